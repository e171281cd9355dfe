"""`Progress`: iterates batches with a tqdm bar on one rank, and without one on the others.

Created by `Fabric.progress`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.extras import require_packages
from fabric.utilities.data import sized_len

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


class Progress(Generic[T]):
    """The batches of a loader, with a bar while they are iterated, or without one.

    Args:
        batches: The loader. The bar of a resumed epoch begins at the loader's position.
        show: Whether to show a bar.
        settings: Arguments for tqdm.

    Raises:
        MissingExtraError: tqdm is not installed.
        ArgumentTypeError: tqdm does not take an argument of `settings`.
    """

    def __init__(self, batches: Iterable[T], show: bool, settings: dict[str, Any]) -> None:
        require_packages("fabric.progress", "progress", "tqdm")
        if set(settings) - {"desc"}:
            _check_settings(settings)
        self._batches = batches
        self._settings = settings
        self._values = _Values()
        self._show = show

    def set_postfix(self, **values: Any) -> None:
        """Show `values` after the bar, from its next refresh: numbers, one-element tensors, text by name.

        A tensor is read when the bar is refreshed, at most ten times per second, so steps do not wait for
        the device.
        """
        if self._show:
            self._values.current = {
                name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
            }

    def __iter__(self) -> Iterator[T]:
        return self._with_bar() if self._show else iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def _with_bar(self) -> Iterator[T]:
        batches, tqdm = iter(self._batches), _tqdm_class()
        counts = {"total": sized_len(self._batches), "initial": _batches_done(self._batches)}
        with tqdm(**{**counts, **self._settings}) as bar:
            bar.postfix = self._values
            for batch in batches:
                yield batch
                bar.update()


class _Values:
    """Values after a bar: tqdm accepts any object there, and formats it at each refresh."""

    def __init__(self) -> None:
        self.current: dict[str, Any] = {}

    def __format__(self, spec: str) -> str:
        return "".join([f", {name}={_text(value)}" for name, value in self.current.items()])


def should_show(requested: bool | None) -> bool:
    """Whether to show a bar: as requested; None: if stderr is a terminal or a notebook's."""
    if requested is not None:
        return requested
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules)


def _tqdm_class() -> Any:
    """Return the tqdm class: a widget in a notebook's kernel, if widgets are installed, else text."""
    if parent_process() is not None:  # a rank forked from a kernel cannot use its widgets
        from tqdm.std import tqdm

        return tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing widgets
        from tqdm.auto import tqdm as auto

    return auto


def _check_settings(settings: dict[str, Any]) -> None:
    from tqdm.std import tqdm

    known = [name for name in inspect.signature(tqdm.__init__).parameters if name not in ("self", "kwargs")]
    for name in settings:
        if name not in known:
            from fabric.core.advice import unknown_argument

            raise ArgumentTypeError(unknown_argument("fabric.progress", name, ["show", *known]))


def _batches_done(batches: Any) -> int:
    try:
        return int(getattr(batches, "batches_done", 0))
    except UsageError:  # unknown
        return 0


def _text(value: Any) -> str:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        return str(value) if isinstance(value, int) else f"{value:.4g}"
    except (TypeError, ValueError):
        return str(value)
