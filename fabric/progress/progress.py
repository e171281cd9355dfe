"""`Progress`: batches with a bar of tqdm on the rank that shows one, and as they are elsewhere.

Made by `Fabric.progress`.
"""

from __future__ import annotations

import sys
import warnings
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from fabric.core.errors import UsageError
from fabric.core.extras import require_packages
from fabric.utilities.data import sized_len

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


class Progress(Generic[T]):
    """The batches of a loader, with a bar while they are iterated, or without one.

    Args:
        batches: The loader. What has a `state_dict` keeps it; a resumed epoch begins where it goes on.
        shown: Whether there is a bar.
        settings: For tqdm.

    Raises:
        MissingExtraError: tqdm is not installed.
    """

    def __init__(self, batches: Iterable[T], shown: bool, settings: dict[str, Any]) -> None:
        require_packages("fabric.progress", "progress", "tqdm")
        self._batches = batches
        self._settings = settings
        self._values = _Values()
        self._shown = shown

    def set_postfix(self, **values: Any) -> None:
        """Set the values behind the bar from its next drawing: numbers, one-element tensors, text by name.

        A tensor is read when the bar is drawn, ten times a second at most: a step does not wait for a device.
        """
        if self._shown:
            self._values.now = {
                name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
            }

    def __iter__(self) -> Iterator[T]:
        return self._drawn() if self._shown else iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def _drawn(self) -> Iterator[T]:
        batches, tqdm = iter(self._batches), _kind()
        counts = {"total": sized_len(self._batches), "initial": _done(self._batches)}
        with tqdm(**{**counts, **self._settings}) as bar:
            bar.postfix = self._values
            for batch in batches:
                yield batch
                bar.update()


class _Values:
    """Values behind a bar: tqdm accepts any object there, and formats it when it draws."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}

    def __format__(self, spec: str) -> str:
        return "".join([f", {name}={_text(value)}" for name, value in self.now.items()])


def shows(asked: bool | None) -> bool:
    """Whether to show a bar: as asked, or where stderr is a terminal or a notebook's."""
    if asked is not None:
        return asked
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules)


def _kind() -> Any:
    """The class of the bar: in a notebook's kernel a widget, if there are widgets, elsewhere text."""
    if parent_process() is not None:  # a rank that was forked from a kernel cannot reach its widgets
        from tqdm.std import tqdm

        return tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no widgets
        from tqdm.auto import tqdm as auto

    return auto


def _done(batches: Any) -> int:
    try:
        return int(getattr(batches, "batches_done", 0))
    except UsageError:  # a loader that cannot say it
        return 0


def _text(value: Any) -> str:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        return str(value) if isinstance(value, int) else f"{value:.4g}"
    except (TypeError, ValueError):
        return str(value)
