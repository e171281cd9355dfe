"""`CollectiveVerbs`: collectives over nestings of tensors. All ranks (of the group) must call every verb of
this class.

If ranks call different verbs, or one verb with different data, all of them raise one `CollectiveMismatch`, a
table. `strategies/exchange.py` has the methods that a strategy may override; `collectives/` has the rest.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.checks import metrics_among, warn_of_no_logger
from fabric.core.arguments import collective, explains_arguments
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.messages import kind_of, show
from fabric.core.slices import use_slice
from fabric.core.tree import map_tree
from fabric.facts import RankFacts
from fabric.wrappers import is_wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from fabric.core.types import PathLike
    from fabric.preemption.stopping import Stopper
    from fabric.profile.profile import Profile


@explains_arguments
class CollectiveVerbs(RankFacts):
    """barrier, should_stop, broadcast, gathers, reductions, collective decisions, logs and profiles."""

    _stopper: Stopper | None

    @collective
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this. All ranks must call this, with one `name`."""
        self._strategy.barrier(name)

    @collective
    def should_stop(self) -> bool:
        """Whether to save and stop now: True on all ranks at the same step. All ranks must call this, once
        per step.

        True once any rank received SIGTERM, SIGUSR1, SIGHUP (the end of an ssh session, unless it is ignored)
        or the signal of `SLURMEnvironment(requeue_signal=)`. Also true once the deadline is near:
        FABRIC_DEADLINE (seconds since 1970), else SLURM's end of the job, less FABRIC_DEADLINE_MARGIN
        (120 seconds). The first call installs handlers for these signals, which also call yours; a second
        signal ends the process at once. Costs one small message.

        Raises:
            ConfigurationError: FABRIC_DEADLINE or FABRIC_DEADLINE_MARGIN is not a number of seconds.
        """
        if self._stopper is None:
            try:
                self._stopper = use_slice("preemption").Stopper(*self._strategy.stop_signals())
            except ConfigurationError as error:
                self._strategy.abort_call("should_stop", error)
        return any(self._strategy.all_gather_object(self._stopper.is_requested(), label="should_stop"))

    @collective
    def broadcast(self, obj: Any, src: int = 0, *, group: Any | None = None) -> Any:
        """Return `obj` of global rank `src` on every rank. All ranks of `group` (None: all) must call this.

        Tensors in `obj` are sent as such, the rest is pickled. `obj` of other ranks is ignored.

        Raises:
            CollectiveMismatch: Rank `src`'s `obj` does not pickle; on all ranks.
            ArgumentTypeError: `src` is not an int.
            ConfigurationError: `src` is not a rank.
        """
        src = self._checked_rank("broadcast", "src", src, group)
        more = {} if group is None else {"group": group}  # third-party strategies may not accept `group`
        return self._strategy.broadcast(obj, src, **more)

    @collective
    def all_gather(
        self,
        data: Any,
        group: Any | None = None,
        sync_grads: bool = False,
        *,
        uneven: str = "error",
        async_op: bool = False,
    ) -> Any:
        """Every rank's data, each leaf of shape (world_size, *shape), also on one process. All ranks of the
        group must call this.

        Args:
            data: A tensor, a number, or any nesting of dict, list, tuple, namedtuple and dataclass; structure
                and dtypes are equal on all ranks. Strings and None are equal, too, and returned unchanged.
            group: A process group of torch.distributed; None: all ranks.
            sync_grads: Whether gradients flow back, summed over ranks, to the rank that sent each part.
            uneven: What happens if shapes differ: "error", the table of shapes on all ranks; "list", every
                leaf becomes a list of `world_size` tensors; "cat", leaves are concatenated on dim 0, in rank
                order.
            async_op: Whether to return a handle at once; `handle.wait()` returns the data.

        Raises:
            CollectiveMismatch: A ValueError: structure, dtypes or (with "error") shapes differ; on all ranks.
            ConfigurationError: Unknown `uneven`; "cat" of numbers; `async_op` with `sync_grads` or `uneven`.
            ArgumentTypeError: A leaf is not a tensor, number, string or None.
        """
        if async_op and (sync_grads or uneven != "error"):
            text = "all_gather(async_op=True) takes neither sync_grads=True nor uneven=. Leave async_op out."
            self._strategy.abort_call("all_gather", ConfigurationError(text), group)
        if uneven == "error":
            more = {"async_op": True} if async_op else {}  # third-party strategies may not accept `async_op`
            return self._strategy.all_gather(data, group, sync_grads, **more)
        if uneven not in ("list", "cat"):
            text = f"all_gather(uneven={uneven!r}) is unknown. Write 'error', 'list' or 'cat'."
            self._strategy.abort_call("all_gather", ConfigurationError(text), group)
        gather = use_slice("gradients").all_gather_uneven
        return gather(data, uneven, self._strategy.channel(group), sync_grads)

    @collective
    def all_reduce(
        self,
        data: Any,
        group: Any | None = None,
        reduce_op: Any = "mean",
        *,
        inplace: bool = True,
        sync_grads: bool = False,
        async_op: bool = False,
    ) -> Any:
        """The data reduced over ranks, bitwise equal on all. All ranks of the group must call this.

        Args:
            data: As for `all_gather`; structure, shapes and dtypes equal on all ranks.
            group: As for `all_gather`. If ranks see the same data (pipelines, ContextParallel, tensor
                parallel), `fabric.strategy.data_group` counts each part of the data once.
            reduce_op: "mean", "sum", "min", "max", "product".
            inplace: Whether the tensors of `data` are overwritten (numbers never are).
            sync_grads: Whether gradients flow back to every rank's part; the result is a new tree.
            async_op: Whether to return a handle at once; `handle.wait()` returns the data.

        Raises:
            ArgumentTypeError: The mean of integers, or a leaf that is neither tensor nor number.
            ConfigurationError: Unknown `reduce_op`; `async_op` with `sync_grads`.
        """
        if sync_grads:
            if async_op:
                text = "all_reduce takes async_op=True or sync_grads=True, not both. Leave one of them out."
                self._strategy.abort_call("all_reduce", ConfigurationError(text), group)
            reduce = use_slice("gradients").all_reduce_with_grads
            return reduce(data, reduce_op, self._strategy.channel(group))
        if not inplace:
            data = _copy_tensors(data)
        more = {"async_op": True} if async_op else {}  # third-party strategies may not accept `async_op`
        return self._strategy.all_reduce(data, group, reduce_op, **more)

    @collective
    def reduce_scatter(
        self, data: Any, reduce_op: Any = "mean", group: Any | None = None, *, sync_grads: bool = False
    ) -> Any:
        """This rank's part of the data reduced over ranks: (n / world_size, ...) of (n, ...). All ranks of
        the group must call this.

        Args:
            data: As for `all_gather`; every leaf splits along dim 0 into one part per rank. Not modified.
            reduce_op: As for `all_reduce`.
            group: As for `all_gather`.
            sync_grads: Whether gradients flow back to every rank's part.

        Raises:
            ConfigurationError: A first dimension does not divide by the number of ranks; unknown `reduce_op`.
            ArgumentTypeError: As for `all_reduce`.
        """
        channel = self._strategy.channel(group)
        if sync_grads:
            return use_slice("gradients").reduce_scatter_with_grads(data, reduce_op, channel)
        return use_slice("extra").reduce_scatter_tree(data, reduce_op, channel)

    @collective
    def all_to_all(self, data: Any, group: Any | None = None, *, sync_grads: bool = False) -> Any:
        """Send part i of each leaf (along dim 0) to rank i; part r of the result is from rank r. All ranks of
        the group must call this.

        Args:
            data: As for `all_gather`; every leaf splits along dim 0 into one part per rank. Not modified.
            group: As for `all_gather`.
            sync_grads: Whether gradients flow back to the ranks that sent the parts.

        Raises:
            ConfigurationError: A first dimension that does not divide by the number of ranks.
            ArgumentTypeError: A leaf that is neither tensor nor number.
        """
        channel = self._strategy.channel(group)
        if sync_grads:
            return use_slice("gradients").all_to_all_with_grads(data, channel)
        return use_slice("extra").all_to_all_tree(data, channel)

    @collective
    def gather(self, data: Any, dst: int = 0, group: Any | None = None) -> Any:
        """Return the result of `all_gather(data)` on the global rank `dst`, and None on other ranks.

        All ranks of `group` (None: all) must call this.

        Raises:
            ArgumentTypeError: `dst` is not an int; a leaf is neither tensor nor number.
            ConfigurationError: `dst` is not a rank.
            CollectiveMismatch: Structures, shapes or dtypes differ; on all ranks.
        """
        dst = self._checked_rank("gather", "dst", dst, group)
        from fabric.collectives.gather import gather_tree

        return gather_tree(data, self._strategy.channel(group), dst, verb=f"gather(dst={dst})")

    @collective
    def scatter(self, data: Any, src: int = 0, group: Any | None = None) -> Any:
        """This rank's part of the global rank `src`'s data: (n / world_size, ...) of each (n, ...). All ranks
        of `group` (None: all) must call this.

        The `data` of other ranks is ignored.

        Raises:
            CollectiveMismatch: A leaf of rank `src` is neither tensor nor number, or does not divide by the
                number of ranks; on all ranks.
            ArgumentTypeError: `src` is not an int.
            ConfigurationError: `src` is not a rank.
        """
        src = self._checked_rank("scatter", "src", src, group)
        return use_slice("extra").scatter_tree(data, src, self._strategy.channel(group))

    @collective
    def all_gather_object(self, obj: Any, group: Any | None = None) -> list[Any]:
        """Every rank's `obj`, pickled, in rank order. All ranks of `group` (None: all) must call this.

        Raises:
            ArgumentTypeError: `obj` does not pickle.
        """
        return self._strategy.all_gather_object(obj, group)

    @collective
    def any(self, flag: Any) -> bool:
        """Whether `flag` is true on any rank. All ranks must call this.

        Raises:
            ArgumentTypeError: `flag` has no single truth value: a tensor of several elements.
        """
        return self._strategy.reduce_boolean_decision(self._checked_flag("any", flag), all=False)

    @collective
    def all(self, flag: Any) -> bool:
        """Whether `flag` is true on all ranks. All ranks must call this.

        Raises:
            ArgumentTypeError: `flag` has no single truth value: a tensor of several elements.
        """
        return self._strategy.reduce_boolean_decision(self._checked_flag("all", flag), all=True)

    @collective
    def agree(self, value: Any) -> Any:
        """`value`, after a check that it is equal on all ranks. All ranks must call this.

        Raises:
            CollectiveMismatch: The values differ; on all ranks. The message is a table of values and lines.
            ArgumentTypeError: `value` is a model, optimizer or loader that was set up.
        """
        if is_wrapped(value):
            text = f"fabric.agree got {kind_of(value)}, which was set up. Write fabric.check_replicas(model)."
            self._strategy.abort_call("agree", ArgumentTypeError(text))
        return use_slice("agreement").agreed(value, self._strategy.channel())

    @collective
    def compute_metrics(self, metrics: Any) -> Any:
        """Values of metrics over the data of all ranks, as one process would compute them. All ranks must
        call this.

        If ranks see the same data (ranks of one pipeline, or ranks that share sequences), the last of them
        that updated a metric contributes its state.

        Args:
            metrics: A torchmetrics Metric, MetricCollection or MetricTracker (its current step), or any
                nesting of them, equal on all ranks. Each keeps the states of this rank; one without updates
                on this rank contributes nothing.

        Raises:
            ArgumentTypeError: A leaf is not a metric.
            CollectiveMismatch: Ranks hold different metrics, or states of different shapes; on all ranks.
            UsageError: A metric is synchronised already, or a MetricCollection guessed wrong compute groups.
        """
        return use_slice("metrics").compute_metrics(metrics, *self._strategy.data_parallel_layout())

    def log(
        self,
        name: str,
        value: Any,
        step: int | None = None,
        *,
        sync_dist: bool = False,
        reduce_fx: str = "mean",
    ) -> Any:
        """Log one value to every logger, and return it as logged. Arguments and errors as for `log_dict`.

        With `sync_dist`, or if the value is a metric, all ranks must call this.
        """
        return self.log_dict({name: value}, step, sync_dist=sync_dist, reduce_fx=reduce_fx)[name]

    def log_dict(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        *,
        sync_dist: bool = False,
        reduce_fx: str = "mean",
    ) -> dict[str, Any]:
        """Log values by name to every logger, and return them as logged.

        A metric of torchmetrics is logged by its value over all ranks. With one, or with `sync_dist`, all
        ranks must call this. If ranks see the same data (ranks of one pipeline, or ranks that share
        sequences), `sync_dist` counts one value of them: the last stage's, if the others have None; for "min"
        and "max" all of them.

        Args:
            metrics: Numbers, one-element tensors and metrics by name.
            step: The training step; None: the logger counts.
            sync_dist: Whether values are reduced over ranks first, by one collective of all ranks.
            reduce_fx: "mean", "sum", "min", "max" or "product".

        Returns:
            The numbers by name. With `sync_dist`, and for metrics, they are equal on all ranks, so that
            decisions by them are, too (early stopping, the best checkpoint). Others are this rank's values.

        Raises:
            ArgumentTypeError: `metrics` is not a dictionary, or a name is not a str.
            CollectiveMismatch: With `sync_dist`: names differ between ranks; on all ranks.
            ConfigurationError: A tensor of several elements; unknown `reduce_fx`.
        """
        computed = metrics_among(metrics)
        if sync_dist:
            self._require_launch("log_dict(sync_dist=True)")
            reduce_scalars = use_slice("logged numbers").reduce_scalars
            plain = {name: value for name, value in metrics.items() if name not in computed}
            metrics = {**metrics, **reduce_scalars(plain, reduce_fx, *self._strategy.data_parallel_layout())}
        if computed:
            metrics = {**metrics, **self.compute_metrics(dict(sorted(computed.items())))}
        from fabric.utilities.apply_func import convert_tensors_to_scalars

        values: dict[str, Any] = convert_tensors_to_scalars(metrics)
        if not (self._loggers or sync_dist or computed):  # else the loop may use the returned value only
            warn_of_no_logger()
        for logger in self._loggers:
            logger.log_metrics(metrics=values, step=step)
        return values

    def profile(
        self,
        folder: PathLike,
        *,
        ranks: list[int] | None = None,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        **settings: Any,
    ) -> AbstractContextManager[Profile]:
        """Context that writes `folder/rank_N.json`, a trace of some steps for Perfetto, and prints the time
        of each phase. All ranks must call this, with the same numbers.

            with fabric.profile("trace") as prof:
                for batch in loader:
                    ...
                    prof.step()

        At the end rank zero prints milliseconds per step of data, forward, backward, communication and step,
        the mean over ranks and the slowest rank. These are host times: on a device forward and backward end
        when their kernels are queued, and the trace has rows for the device. Phases overlap.

        Args:
            folder: Created if missing; traces in it are replaced.
            ranks: Ranks that record; None: all.
            wait: Number of steps that are skipped first.
            warmup: Number of steps after these that run under the profiler, unrecorded: it slows them down.
            active: Number of steps that are recorded then.
            settings: For `torch.profiler.profile` (`with_stack=True`, `profile_memory=True`, ...).

        Raises:
            ConfigurationError: Impossible numbers of steps, or unknown ranks; on all ranks.
            UsageError: `profile` is active already; on all ranks.
            CollectiveMismatch: A rank did not enter, or entered with other numbers; on all ranks.
        """
        self._require_launch("profile()")
        profiled = use_slice("profile").profiled
        window = {"wait": wait, "warmup": warmup, "active": active}
        made: AbstractContextManager[Profile] = profiled(self, folder, ranks, window, settings)
        return made

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank zero first (a download), then on the others. All ranks must call this.

        A barrier precedes the block. If rank zero (of any machine) raises in the block, all ranks raise, and
        the others do not enter it. The block may take longer than the timeout of collectives.

        Args:
            local: Rank zero of each machine first, instead of rank zero of the job.
        """
        if self._strategy.topology.world_size == 1:
            yield
            return
        self._require_launch("rank_zero_first()")
        with use_slice("rank zero first").rank_zero_first_context(self._strategy, local):
            yield

    def _checked_flag(self, verb: str, flag: Any) -> bool:
        try:
            return bool(flag)
        except (RuntimeError, ValueError, TypeError) as error:  # raised by tensors of several elements
            text = (
                f"fabric.{verb} takes one truth value, but got a {type(flag).__name__} that has none "
                f"({error}). Write fabric.{verb}(flag.{verb}())."
            )
            self._strategy.abort_call(verb, ArgumentTypeError(text))

    def _checked_rank(self, verb: str, name: str, rank: Any, group: Any) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            kind = ConfigurationError if isinstance(rank, int) else ArgumentTypeError
            error = kind(
                f"{verb}({name}={show(rank)}) is no rank. Write a global rank, from 0 to "
                f"{self.world_size - 1}."
            )
            self._strategy.abort_call(verb, error, group)
        return self._strategy.root(rank, group)


def _copy_tensors(data: Any) -> Any:
    return map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, data)
