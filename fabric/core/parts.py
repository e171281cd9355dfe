"""`Part`: the interface by which a capability hooks into a strategy.

A strategy is a list of parts: its layout, its precision, those of its arguments (`ContextParallel`), and with
several ranks those of slices (`PARTS` in core/slices.py). It calls a method only of the parts that override
it, so an unused capability costs nothing. Parts are called in the order of that list.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fabric.core.traits import overridden

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class Part:
    """One capability of a strategy. The methods of this base do nothing; override those that you need.

    Strategies call the methods up to `teardown`, in the order of a job. The methods after it are called by
    torch in this process: `core/backward_listeners.py` registers a part for them.
    """

    name = ""
    """The argument of `strategy.find_part(name)`."""

    def resolve(self, plan: Any) -> None:
        """Check the resolved arguments of `Fabric` (`plan`, a `Plan`) before ranks start.

        Raises:
            ConfigurationError: They do not fit this part.
        """

    def join(self, strategy: Any) -> None:
        """Create groups, connections and threads of this part of `strategy`, whose process group exists. All
        ranks must call this.
        """

    @property
    def data_rank(self) -> tuple[int, int] | None:
        """(index of the data shard of this rank, number of shards); None: not decided by this part."""
        return None

    @property
    def data_group(self) -> Any | None:
        """The process group of ranks that read different data; None: not decided by this part."""
        return None

    def setup(self, module: Module, wrap: Callable[[Module], Module]) -> Module:
        """Return `wrap(module)`, the layout's wrapper, with this part's work before and after it. All ranks
        must call this.
        """
        return wrap(module)

    def added(
        self,
        model: Any | None,
        optimizers: Iterable[Optimizer],
        *,
        replicated: bool,
        rank_local: Iterable[str],
    ) -> None:
        """Register a model, as `fabric.setup` returns it, and the user's optimizers. All ranks must call
        this.

        Args:
            model: None if optimizers were set up alone.
            optimizers: Those that were set up in the same call.
            replicated: Whether their values are equal on all ranks.
            rank_local: Names of the model's buffers that each rank keeps for itself.
        """

    def copied(self, model: Any) -> None:
        """Register `model`, a copy of a model that was set up, made by `copy.deepcopy` or unpickling."""

    def clipping(self, optimizer: Optimizer, limits: dict[str, Any]) -> None:
        """Run before `fabric.clip_gradients` clips gradients of `optimizer`, the user's.

        `limits`: {"clip_val": ..., "max_norm": ..., "norm_type": ...}, the arguments of the call.
        """

    def normalizing(self, parameters: list[Any]) -> None:
        """Run before `normalize_gradients` divides the gradients of `parameters` by a number of items."""

    def reducing(self, tensors: list[Tensor], label: str, is_mean: bool, channel: Any) -> None:
        """Run before the reduction over ranks is written into tensors that a graph computed.

        Args:
            tensors: Those of the call with a `grad_fn`, while gradients are enabled.
            label: The user's call, for messages.
            is_mean: Whether the operation is a mean.
            channel: The group.
        """

    def stepping(self, optimizer: Optimizer) -> None:
        """Run before the first step of `optimizer`, if all of its parameters are averaged; also without
        setup.
        """

    def synchronised(self, modules: Collection[Module] | None, only: list[Tensor] | None = None) -> None:
        """Run after gradients were synchronised. All ranks must call this.

        It runs after the backward, under FSDP at the next step, under local SGD after a round.

        Args:
            modules: The user's modules that have these gradients. None: the gradients are those of free
                parameters, which belong to no model.
            only: The parameters that were synchronised; None: all.
        """

    def epoch_begun(self) -> Any:
        """Return the state at the begin of an epoch of a set-up loader, for `epoch_ended`."""

    def epoch_ended(self, begun: Any, uneven_rows: int) -> None:
        """Run at the end of an epoch. All ranks must call this.

        Args:
            begun: The result of `epoch_begun`.
            uneven_rows: Rows of the epoch's last global batch, if ranks had unequal or repeated shares of it
                and the user did not choose so; else 0.
        """

    def trial(self) -> AbstractContextManager[Any]:
        """Return a context of training steps that are undone afterwards (`fabric.find_batch_size`)."""
        return nullcontext()

    def saving(self) -> None:
        """Run before values are written to a checkpoint. All ranks must call this."""

    def facts(self) -> bytes:
        """Return 16 bytes that the call check of each verb compares between ranks, with the call."""
        return b""

    def differ(self, channel: Any) -> None:
        """Raise an error that explains why `facts` differ, or return if the difference is harmless. All ranks
        of `channel` must call this.
        """

    def failed(self, error: Exception, doing: str) -> None:
        """Raise a clearer error in place of `error`, which torch raised in `doing`, if this part has one."""

    def teardown(self) -> None:
        """Release the groups, threads and files of this part."""

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run an outermost backward pass, also a plain `loss.backward()`: `run(tensors, *args, **kwargs)`."""
        run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Run after a nested backward pass."""

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Run before a step of `optimizer`, any optimizer of this process; an error prevents the step.

        `args` and `kwargs` are those of the call of `step`.
        """

    def before_clip(self, gradients: list[Tensor]) -> None:
        """Run before torch's functions clip `gradients`; an error prevents the clip."""


HOOKS = [name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")]
"""Names of the methods of `Part`."""


def hooks_of(parts: Iterable[Any]) -> dict[str, list[Callable[..., Any]]]:
    """Return for each hook's name the methods of the parts that override it, in order."""
    found: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
    for part in parts:
        for name in HOOKS:
            if getattr(type(part), name) is not getattr(Part, name):
                found[name].append(getattr(part, name))
    return found


def composed(calls: list[Callable[..., Any]]) -> Callable[..., None] | None:
    """Return one function that runs all `calls`; None: `calls` is empty."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def call(*args: Any, **kwargs: Any) -> None:
        for each in calls:
            each(*args, **kwargs)

    return call


class JoinedFacts:
    """Facts of several parts, joined for the call check.

    Args:
        parts: Parts that override `facts`.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self._explaining = False

    def facts(self) -> bytes:
        """Return a digest of the facts of all parts; zeros while `differ` runs."""
        if self._explaining:  # parts exchange messages in `differ`, which must not fail the check again
            return bytes(16)
        return blake2b(b"".join([part.facts() for part in self._parts]), digest_size=16).digest()

    def differ(self, channel: Any) -> None:
        """Call `differ` of each part. All ranks of the channel must call this."""
        self._explaining = True
        try:
            for part in self._parts:
                part.differ(channel)
        finally:
            self._explaining = False


def facts_of(parts: Iterable[Any]) -> Any | None:
    """Return the object whose `facts` the call check compares; None: no part has any."""
    having = [part for part in parts if overridden(type(part), Part, "facts")]
    return JoinedFacts(having) if len(having) > 1 else having[0] if having else None
