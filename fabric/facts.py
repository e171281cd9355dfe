"""`RankFacts`: read-only attributes of this process, and the base class of `Fabric`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from fabric.core.arguments import explains_arguments
from fabric.core.errors import ArgumentTypeError, NoLoggerError, UsageError
from fabric.core.messages import kind_of
from fabric.core.slices import use_slice
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.accelerators.accelerator import Accelerator
    from fabric.loggers.logger import Logger
    from fabric.precision.precision import Precision
    from fabric.progress.progress import Progress
    from fabric.strategies.strategy import Strategy

T = TypeVar("T")


@explains_arguments
class RankFacts:
    """Rank, device, strategy and callbacks of this process, as attributes for training loops."""

    _strategy: Strategy
    _loggers: list[Logger]
    _callbacks: list[Any]
    _launched: bool

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator that holds the tensors."""
        return self._strategy.accelerator  # type: ignore[return-value]  # bound

    @property
    def strategy(self) -> Strategy:
        """The strategy that places models, optimizers and data on devices and ranks."""
        return self._strategy

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._strategy.root_device

    @property
    def global_rank(self) -> int:
        """The rank of this process in the job, from 0."""
        return self._strategy.topology.job_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, from 0."""
        return self._strategy.topology.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this machine, from 0."""
        return self._strategy.topology.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._strategy.topology.job_size

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh over which a strategy shards or splits models.

        Raises:
            UsageError: The strategy has none, or `fabric.launch()` has not been called.
        """
        self._require_launch("device_mesh")
        mesh = self._strategy.device_mesh
        if mesh is None:
            raise UsageError(
                f"fabric.device_mesh: {type(self._strategy).__name__} keeps whole parameters and has no "
                "mesh. Choose a strategy that shards or splits models (see fabric/strategies/README.md)."
            )
        return mesh

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank zero, or the first rank of the strategy's process group."""
        return self._strategy.is_global_zero

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Logger:
        """The first logger.

        Raises:
            NoLoggerError: There is none.
        """
        if not self._loggers:
            raise NoLoggerError(
                "fabric.logger: this Fabric has no logger. Write Fabric(loggers=CSVLogger('logs'))."
            )
        return self._loggers[0]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call Python's `print(*args, **kwargs)` on rank zero of each machine only. No rank waits."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def progress(
        self, batches: Iterable[T], desc: str | None = None, *, show: bool | None = None, **settings: Any
    ) -> Progress[T]:
        """The batches, with a progress bar on rank zero and without one on other ranks. No rank waits.

            for batch in (bar := fabric.progress(loader, desc="epoch 0")):
                ...
                bar.set_postfix(loss=loss)

        The bar counts batches of this rank. Each loop over the result has a new bar, which ends with the
        loop. `len` is that of `batches`. In a resumed epoch the bar starts at the saved position. Call
        `state_dict` on the loader itself.

        Args:
            batches: A loader, set up or not, or any iterable.
            desc: Text before the bar.
            show: Whether rank zero shows it. None: if stderr is a terminal, or in a notebook.
            settings: For tqdm (`leave=False`, `total=`, ...).

        Raises:
            ArgumentTypeError: `batches` is not iterable, or tqdm does not take an argument of `settings`.
            MissingExtraError: tqdm is not installed.
        """
        if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            raise ArgumentTypeError(
                f"fabric.progress needs a loader or another iterable, but got {kind_of(batches)}. Write "
                "fabric.progress(loader), or fabric.progress(range(steps))."
            )
        progress = use_slice("progress")
        shown = self.is_global_zero and progress.should_show(show)
        made: Progress[Any] = progress.Progress(batches, shown, {"desc": desc, **settings})
        return made

    @property
    def _data_rank(self) -> int:
        """Index of the data shard that this rank reads; ranks that split one model read the same shard."""
        return (self._strategy.distributed_sampler_kwargs or {"rank": self.global_rank})["rank"]

    @property
    def _precision(self) -> Precision:
        return self._strategy.precision

    def _validate_launched(self) -> None:
        self._require_launch("_validate_launched()")

    def _require_launch(self, verb: str) -> None:
        if not self._launched:
            raise UsageError(
                f"fabric.{verb} was used before fabric.launch(): the other ranks have not started yet. "
                f"Write fabric.launch() right after Fabric(...)."
            )

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of every callback that has it, with `args` and `kwargs`. No rank waits.

        Raises:
            ArgumentTypeError: `hook_name` is not a str.
        """
        if not isinstance(hook_name, str):
            raise ArgumentTypeError(
                f"fabric.call needs the name of a method, but got {hook_name!r:.60}. Write "
                'fabric.call("on_train_epoch_end").'
            )
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                rank_zero_warn(
                    f"{type(callback).__name__}.{hook_name} is not a method, so fabric.call skips it."
                )
                continue
            method(*args, **kwargs)
