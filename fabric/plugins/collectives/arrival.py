"""`Arrival`: the first call of a group, through the store. `control.py` makes one for each attempt."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fabric.plugins.collectives.job_store import StoreSilent

if TYPE_CHECKING:
    from datetime import timedelta


class Arrival:
    """The first call of a group, through the store: there is no control group to meet on yet."""

    def __init__(self, store: Any, name: str, attempt: int, members: list[int]) -> None:
        self._store, self._prefix = store, f"{name}/{attempt}"
        self._keys = [f"{self._prefix}/{rank}" for rank in members]

    def tell(self, rank: int, text: str) -> None:
        """Say that this rank is here."""
        self._store.set(f"{self._prefix}/{rank}", text)
        self._store.add(self._prefix, 1)  # all look at this one: N keys at each look would be N times N

    def came(self) -> set[int]:
        """The members that are here."""
        return {int(key.rpartition("/")[2]) for key in self._store.get_all(self._keys)}

    def told(self) -> list[str]:
        """What every member said."""
        return [text.decode() for text in self._store.get_all(self._keys).values()]

    def is_completed(self) -> bool:
        """Whether all members are here."""
        with suppress(StoreSilent):  # the time for the call runs out
            return self._store.add(self._prefix, 0) >= len(self._keys)  # type: ignore[no-any-return]
        return False

    def wait(self, timeout: timedelta) -> None:
        """Wait until all members are here; raises RuntimeError when `timeout` has passed."""
        end, pause = time.monotonic() + timeout.total_seconds(), 0.0005
        while not self.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("not all ranks are here")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
