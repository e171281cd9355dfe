"""Import of the package horovod, and its errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fabric.core.errors import RankError
from fabric.core.extras import import_package

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALL = "bash tests/integrations/horovod/install.sh VENV"


def load_horovod() -> Any:
    """Import, initialise and return `horovod.torch`.

    Raises:
        MissingExtraError: Horovod is not installed, or does not load. Pip alone does not build 0.28 against
            torch 2.13; the script in the message does.
    """
    instead = 'write strategy="ddp", which needs nothing else'
    horovod = import_package("horovod.torch", 'strategy="horovod"', _INSTALL, least="0.28", instead=instead)
    horovod.init()
    return horovod


@contextmanager
def translated_errors(doing: str) -> Iterator[None]:
    """Context for Horovod's collectives that replaces its error by a RankError.

    Raises:
        RankError: Horovod stopped, as it does on all ranks if one exits.
    """
    import horovod.torch as hvd

    try:
        yield
    except hvd.HorovodInternalError as error:
        raise RankError(
            f"Horovod stopped while this rank {doing} ({error}). Another rank has ended, or failed: its "
            "output says why. If it had fewer batches, let each rank call fabric.strategy.join() after its "
            "last one."
        ) from error
