"""`CollectiveVerbs`: data across ranks, for the user's own loop. All ranks (of the group) must call every
verb here.

Ranks that call different verbs, or one verb with different data, all get one `CollectiveMismatch`, a table.
What a strategy may override is in `strategies/exchange.py`, the rest in `plugins/collectives/`.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.checks import metrics_among, warn_of_no_logger
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.slices import use_slice
from fabric.core.tree import map_tree
from fabric.facts import RankFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from fabric.core.compile import Verb
    from fabric.core.types import PathLike
    from fabric.preemption.stopping import Stopper
    from fabric.profile.profile import Profile


def together(verb: Verb) -> Verb:
    """`verb` after launch; run as plain Python also where a compiled function calls it: see `eager`."""
    plain: Any = None

    @functools.wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        if not self._launched:
            self._require_launch(f"{verb.__name__}()")
        if "torch._dynamo" not in sys.modules:
            return verb(self, *args, **kwargs)
        if plain is None:
            plain = torch.compiler.disable(verb)
        return plain(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class CollectiveVerbs(RankFacts):
    """barrier, should_stop, broadcast, gathers, reductions, decisions, logs and profiles."""

    _stopper: Stopper | None

    @together
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here. All ranks must call this, with the same `name`."""
        self._strategy.barrier(name)

    @together
    def should_stop(self) -> bool:
        """Whether to save and end now: True on all ranks at the same step. All ranks must call this, once per
        step.

        It is once any rank has got SIGTERM, SIGUSR1, SIGHUP (the end of an ssh session, unless it is ignored)
        or the signal of `SLURMEnvironment(requeue_signal=)`, or once the deadline is near: FABRIC_DEADLINE
        (seconds since 1970), else SLURM's end of the job, less FABRIC_DEADLINE_MARGIN (120 seconds). The
        first call takes these signals over; handlers of yours are called, too, and a second signal ends the
        process at once. One small message.

        Raises:
            ConfigurationError: The deadline cannot be read.
        """
        if self._stopper is None:
            try:
                self._stopper = use_slice("preemption").Stopper(*self._strategy.stop_signals())
            except ConfigurationError as error:
                self._strategy.abort_call("should_stop", error)
        return any(self._strategy.all_gather_object(self._stopper.is_requested(), label="should_stop"))

    @together
    def broadcast(self, obj: Any, src: int = 0, *, group: Any | None = None) -> Any:
        """The global rank `src`'s `obj` on every rank; tensors travel as such, all else is pickled. All ranks
        of `group` must call this.

        Raises:
            CollectiveMismatch: Rank `src`'s `obj` does not pickle; on all ranks.
            ArgumentTypeError: `src` is no int.
            ConfigurationError: `src` is no rank.
        """
        src = self._checked_rank("broadcast", "src", src, group)
        more = {} if group is None else {"group": group}  # strategies of others do not know it
        return self._strategy.broadcast(obj, src, **more)

    @together
    def all_gather(
        self,
        data: Any,
        group: Any | None = None,
        sync_grads: bool = False,
        *,
        uneven: str = "error",
        async_op: bool = False,
    ) -> Any:
        """Every rank's data, each leaf of shape (world_size, *shape), on one process too. All ranks of the
        group must call this.

        Args:
            data: A tensor, a number, or any nesting of dict, list, tuple, namedtuple and dataclass; structure
                and dtypes are equal on all ranks. Strings and None in it are equal, too, and stay.
            group: A process group of torch.distributed; None: all ranks.
            sync_grads: Whether gradients flow back (summed over ranks) to the rank that a part came from.
            uneven: What happens if shapes differ: "error", the table of shapes on all ranks; "list", every
                leaf becomes a list of `world_size` tensors; "cat", leaves are concatenated on dim 0, in rank
                order.
            async_op: Whether to return a handle while the data travel; `handle.wait()` gives them.

        Raises:
            CollectiveMismatch: A ValueError: structure, dtypes or (with "error") shapes differ; on all ranks.
            ConfigurationError: Unknown `uneven`; "cat" of numbers; `async_op` with `sync_grads` or `uneven`.
            ArgumentTypeError: A leaf that is neither tensor nor number, nor as said.
        """
        if async_op and (sync_grads or uneven != "error"):
            text = "all_gather(async_op=True) takes neither sync_grads=True nor uneven=."
            self._strategy.abort_call("all_gather", ConfigurationError(text), group)
        if uneven == "error":
            more = {"async_op": True} if async_op else {}  # strategies of others do not know it
            return self._strategy.all_gather(data, group, sync_grads, **more)
        if uneven not in ("list", "cat"):
            text = f"all_gather(uneven={uneven!r}): write 'error', 'list' or 'cat'."
            self._strategy.abort_call("all_gather", ConfigurationError(text), group)
        from fabric.collectives.grads import all_gather_uneven

        return all_gather_uneven(data, uneven, self._strategy.channel(group), sync_grads)

    @together
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
        """The data reduced over ranks, the same bits on every rank. All ranks of the group must call this.

        Args:
            data: As for `all_gather`; structure, shapes and dtypes equal on all ranks.
            group: As for `all_gather`. Where ranks see the same data (pipelines, ContextParallel, tensor
                parallel), `fabric.strategy.data_group` counts each part of the data once.
            reduce_op: "mean", "sum", "min", "max", "product".
            inplace: Whether the tensors of `data` are overwritten (numbers never are).
            sync_grads: Whether gradients flow back to every rank's part; the result is a new tree.
            async_op: Whether to return a handle while the data travel; `handle.wait()` gives them.

        Raises:
            ArgumentTypeError: The mean of integers, or a leaf that is neither tensor nor number.
            ConfigurationError: Unknown `reduce_op`; `async_op` with `sync_grads`.
        """
        if sync_grads:
            if async_op:
                text = "all_reduce takes async_op=True or sync_grads=True, not both."
                self._strategy.abort_call("all_reduce", ConfigurationError(text), group)
            from fabric.collectives.grads import all_reduce_with_grads

            return all_reduce_with_grads(data, reduce_op, self._strategy.channel(group))
        if not inplace:
            data = _copy_tensors(data)
        more = {"async_op": True} if async_op else {}  # strategies of others do not know it
        return self._strategy.all_reduce(data, group, reduce_op, **more)

    @together
    def reduce_scatter(
        self, data: Any, reduce_op: Any = "mean", group: Any | None = None, *, sync_grads: bool = False
    ) -> Any:
        """This rank's part of the data reduced over ranks: (n / world_size, ...) of (n, ...). All ranks of
        the group must call this.

        Args:
            data: As for `all_gather`; every leaf splits along dim 0 into a part for each rank. Left as it is.
            reduce_op: As for `all_reduce`.
            group: As for `all_gather`.
            sync_grads: Whether gradients flow back to every rank's part.

        Raises:
            ConfigurationError: A first dimension does not divide by the number of ranks; unknown `reduce_op`.
            ArgumentTypeError: As for `all_reduce`.
        """
        from fabric.collectives.grads import reduce_scatter_with_grads

        scatter = reduce_scatter_with_grads if sync_grads else use_slice("extra").reduce_scatter_tree
        return scatter(data, reduce_op, self._strategy.channel(group))

    @together
    def all_to_all(self, data: Any, group: Any | None = None, *, sync_grads: bool = False) -> Any:
        """Part i of each leaf (along dim 0) to rank i, and part r from rank r; shapes stay. All ranks of the
        group must call this.

        Args:
            data: As for `all_gather`; every leaf splits along dim 0 into a part for each rank. Left as it is.
            group: As for `all_gather`.
            sync_grads: Whether gradients flow back the way the parts came.

        Raises:
            ConfigurationError: A first dimension that does not divide by the number of ranks.
            ArgumentTypeError: A leaf that is neither tensor nor number.
        """
        from fabric.collectives.grads import all_to_all_with_grads

        exchange = all_to_all_with_grads if sync_grads else use_slice("extra").all_to_all_tree
        return exchange(data, self._strategy.channel(group))

    @together
    def gather(self, data: Any, dst: int = 0, group: Any | None = None) -> Any:
        """Return what `all_gather` gives of `data`, on the global rank `dst` only; None on other ranks.

        All ranks of `group` must call this.

        Raises:
            ArgumentTypeError: `dst` is no int; a leaf that is neither tensor nor number.
            ConfigurationError: `dst` is no rank.
            CollectiveMismatch: Structures, shapes or dtypes differ; on all ranks.
        """
        dst = self._checked_rank("gather", "dst", dst, group)
        from fabric.collectives.gather import gather_tree

        return gather_tree(data, self._strategy.channel(group), dst, verb=f"gather(dst={dst})")

    @together
    def scatter(self, data: Any, src: int = 0, group: Any | None = None) -> Any:
        """This rank's part of the global rank `src`'s data: (n / world_size, ...) of each (n, ...). All ranks
        of `group` must call this.

        What the other ranks pass is ignored.

        Raises:
            CollectiveMismatch: A leaf of rank `src` is neither tensor nor number, or does not divide by the
                number of ranks; on all ranks.
            ArgumentTypeError: `src` is no int.
            ConfigurationError: `src` is no rank.
        """
        src = self._checked_rank("scatter", "src", src, group)
        return use_slice("extra").scatter_tree(data, src, self._strategy.channel(group))

    @together
    def all_gather_object(self, obj: Any, group: Any | None = None) -> list[Any]:
        """Every rank's `obj`, pickled on its way, in rank order. All ranks of `group` must call this.

        Raises:
            ArgumentTypeError: `obj` does not pickle.
        """
        return self._strategy.all_gather_object(obj, group)

    @together
    def any(self, flag: Any) -> bool:
        """Whether `flag` is true on any rank. All ranks must call this.

        Raises:
            ArgumentTypeError: `flag` has no single truth value: a tensor of several elements.
        """
        return self._strategy.reduce_boolean_decision(self._checked_flag("any", flag), all=False)

    @together
    def all(self, flag: Any) -> bool:
        """Whether `flag` is true on all ranks. All ranks must call this.

        Raises:
            ArgumentTypeError: `flag` has no single truth value: a tensor of several elements.
        """
        return self._strategy.reduce_boolean_decision(self._checked_flag("all", flag), all=True)

    @together
    def agree(self, value: Any) -> Any:
        """`value`, which all ranks must hold alike. All ranks must call this.

        Raises:
            CollectiveMismatch: They do not; the message is a table of values and lines. Raised on all ranks.
        """
        from fabric.collectives.agreement import agreed

        return agreed(value, self._strategy.channel())

    @together
    def compute_metrics(self, metrics: Any) -> Any:
        """The values that one process would compute which saw the data of all ranks. All ranks must call
        this.

        Where ranks see the same data (a pipeline's, or those that share sequences), the last of them that
        updated a metric stands for all.

        Args:
            metrics: A torchmetrics Metric, MetricCollection or MetricTracker (its current step), or any
                nesting of them, alike on all ranks. They keep the states of this rank; one that was never
                updated here contributes nothing.

        Raises:
            ArgumentTypeError: A leaf that is no metric.
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
        """One value by its name to every logger; gives what was logged. Arguments and errors as for
        `log_dict`.

        With `sync_dist`, and where the value is a metric, all ranks must call this.
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
        """Values by name to every logger; one-element tensors become numbers. Gives what was logged.

        A metric of torchmetrics is logged by its value over all ranks. With one, or with `sync_dist`, all
        ranks must call this. Where ranks see the same data (a pipeline's, or those that share sequences),
        `sync_dist` counts one value of them: the last stage's, if others have None; "min" and "max", all.

        Args:
            metrics: Numbers, one-element tensors and metrics by name.
            step: Of the training; None: the logger counts.
            sync_dist: Whether values are reduced over ranks first, by one collective of all ranks.
            reduce_fx: "mean", "sum", "min", "max" or "product".

        Returns:
            The numbers by name. With `sync_dist`, and of metrics, they are the same on all ranks, so that all
            decide alike by them (to stop early, which checkpoint is best); others are this rank's own.

        Raises:
            ArgumentTypeError: A name is no str.
            CollectiveMismatch: With `sync_dist`: names differ between ranks; on all ranks.
            ConfigurationError: A tensor of several elements; unknown `reduce_fx`.
        """
        computed = metrics_among(metrics)
        if sync_dist:
            self._require_launch("log_dict(sync_dist=True)")
            from fabric.collectives.scalars import reduce_scalars

            plain = {name: value for name, value in metrics.items() if name not in computed}
            metrics = {**metrics, **reduce_scalars(plain, reduce_fx, *self._strategy.data_parallel_layout())}
        if computed:
            metrics = {**metrics, **self.compute_metrics(dict(sorted(computed.items())))}
        from fabric.utilities.apply_func import convert_tensors_to_scalars

        values: dict[str, Any] = convert_tensors_to_scalars(metrics)
        if not (self._loggers or sync_dist or computed):  # else the returned value may be what is wanted
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
        """Context that writes `folder/rank_N.json`, a trace of some steps for Perfetto, and prints where they
        went. All ranks must call this, with the same numbers.

            with fabric.profile("trace") as prof:
                for batch in loader:
                    ...
                    prof.step()

        At the end rank zero prints milliseconds per step of data, forward, backward, communication and step,
        the mean over ranks and the slowest rank. They are the host's: on a device forward and backward end
        when all is queued, and the trace has rows for what the device did. Phases overlap.

        Args:
            folder: Made where it is missing; traces in it are replaced.
            ranks: Which record; None: all.
            wait: Steps that are skipped first.
            warmup: Steps after these, under the profiler, whose times would be too long.
            active: Steps that are recorded then.
            settings: For `torch.profiler.profile` (`with_stack=True`, `profile_memory=True`, ...).

        Raises:
            ConfigurationError: Steps or ranks that cannot be; on all ranks.
            CollectiveMismatch: A rank did not enter, or with other numbers; on all ranks.
        """
        self._require_launch("profile()")
        profiled = use_slice("profile").profiled
        window = {"wait": wait, "warmup": warmup, "active": active}
        made: AbstractContextManager[Profile] = profiled(self, folder, ranks, window, settings)
        return made

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """The block on rank zero first (a download), then on the others. All ranks must call this.

        All ranks come together before rank zero enters. If it raises in the block (of any machine), all ranks
        raise, and those that come later do not enter it. It may take longer than collectives wait for a rank.

        Args:
            local: Rank zero of each machine first, instead of rank zero of the job.
        """
        if self._strategy.topology.world_size == 1:
            yield
            return
        self._require_launch("rank_zero_first()")
        from fabric.strategies.rank_zero_first import rank_zero_first_context

        with rank_zero_first_context(self._strategy, local):
            yield

    def _checked_flag(self, verb: str, flag: Any) -> bool:
        try:
            return bool(flag)
        except (RuntimeError, ValueError, TypeError) as error:  # a tensor or an array of several elements
            text = (
                f"fabric.{verb} takes one truth value, but got a {type(flag).__name__} that has none "
                f"({error}). Write fabric.{verb}(flag.{verb}())."
            )
            self._strategy.abort_call(verb, ArgumentTypeError(text))

    def _checked_rank(self, verb: str, name: str, rank: Any, group: Any) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            kind = ConfigurationError if isinstance(rank, int) else ArgumentTypeError
            error = kind(f"{verb}({name}={rank!r}): {name} is a rank, from 0 to {self.world_size - 1}.")
            self._strategy.abort_call(verb, error, group)
        return self._strategy.root(rank, group)


def _copy_tensors(data: Any) -> Any:
    return map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, data)
