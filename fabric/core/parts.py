"""`Part`: the one interface by which a capability takes part in what a strategy does.

A strategy is a list of parts: its layout, its precision, what its arguments add (`ContextParallel`), and what
slices add where there are several ranks (`PARTS` in core/slices.py). It calls a method only of the parts that
override it, so a capability that is not used costs nothing. Parts are called in the order of that list.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fabric.core.traits import overridden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class Part:
    """One capability of a strategy. Each method does nothing here; override what the capability needs.

    The first group is called by every strategy, and follows a job from its arguments to its end. The second
    group is called by torch in this process: `core/backward_listeners.py` registers a part for it.
    """

    name = ""
    """By which `strategy.find_part(name)` finds it."""

    def resolve(self, plan: Any) -> None:
        """Check the resolved arguments of `Fabric` (`plan`, a `Plan`) before ranks start.

        Raises:
            ConfigurationError: They do not fit this part.
        """

    def join(self, strategy: Any) -> None:
        """Make groups, connections and threads: this process has its rank, and the process group exists. All
        ranks must call this.
        """

    @property
    def data_rank(self) -> tuple[int, int] | None:
        """(which share of the data this rank reads, of how many); None: this part does not decide it."""
        return None

    @property
    def data_group(self) -> Any | None:
        """The process group of ranks that read different data; None: this part does not decide it."""
        return None

    def setup(self, module: Module, wrap: Callable[[Module], Module]) -> Module:
        """Wrap a module by calling `wrap`, and do before and after it what this part needs. All ranks must
        call this.
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
            model: None where optimizers were set up alone.
            optimizers: Those that were set up with it.
            replicated: Whether all ranks hold the same values of them.
            rank_local: Names of the model's buffers that each rank keeps for itself.
        """

    def copied(self, model: Any) -> None:
        """Register a copy of a model that was set up, made by `copy.deepcopy` or unpickling."""

    def clipping(self, optimizer: Optimizer, limits: dict[str, Any]) -> None:
        """Note the limits that `fabric.clip_gradients` is called with."""

    def normalizing(self) -> None:
        """Note that the loop divides gradients by its number of items (`fabric.normalize_gradients`)."""

    def stepping(self, optimizer: Optimizer) -> None:
        """Run before the first step of an optimizer, set up or not, all of whose parameters are averaged."""

    def synchronised(self, modules: Iterable[Module], only: list[Tensor] | None = None) -> None:
        """Run once gradients of these modules of the user are synchronised: after the backward, under FSDP at
        the step after it, under local SGD after a round.

        `only`: the parameters that it synchronised; None: all. All ranks must call this.
        """

    def epoch_begun(self) -> Any:
        """Return what `epoch_ended` needs of the moment in which a set-up loader begins an epoch."""

    def epoch_ended(self, begun: Any) -> None:
        """Run at the end of an epoch; `begun` is what `epoch_begun` returned. All ranks must call this."""

    def saving(self) -> None:
        """Run before values are written to a checkpoint. All ranks must call this."""

    def facts(self) -> bytes:
        """Return 16 bytes that the call check of each verb compares between ranks, beside the call."""
        return b""

    def differ(self, channel: Any) -> None:
        """Raise an error that explains why `facts` differ, or return if the difference means nothing. All
        ranks of the channel must call this.
        """

    def failed(self, error: Exception, doing: str) -> None:
        """Raise a better error in place of `error`, which torch raised in `doing`, if this part knows one."""

    def teardown(self) -> None:
        """Release what this part holds: groups, threads, files."""

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run an outermost backward pass, `run(tensors, *args, **kwargs)`; a plain `loss.backward()`, too."""
        run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Run when a backward pass inside of another has ended."""

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Run before a step of any optimizer of this process, with its `args` and `kwargs`; raise to refuse
        it.
        """

    def before_clip(self, gradients: list[Tensor]) -> None:
        """Run before torch's own functions clip gradients; raise to refuse it."""


HOOKS = [name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")]
"""Names of the methods of `Part`."""


def hooks_of(parts: Iterable[Any]) -> dict[str, list[Callable[..., Any]]]:
    """Return, by the name of each hook, the methods of the parts that override it, in order."""
    found: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
    for part in parts:
        for name in HOOKS:
            if getattr(type(part), name) is not getattr(Part, name):
                found[name].append(getattr(part, name))
    return found


def composed(calls: list[Callable[..., Any]]) -> Callable[..., None] | None:
    """Return one function that makes all calls; None: there are none."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def call(*args: Any, **kwargs: Any) -> None:
        for each in calls:
            each(*args, **kwargs)

    return call


class JoinedFacts:
    """The facts of several parts as those of one.

    Args:
        parts: Those that override `facts`.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self._explaining = False

    def facts(self) -> bytes:
        """Return a digest of the facts of all parts; while they explain a difference, zeros."""
        if self._explaining:  # parts exchange messages for this, whose facts must not differ again
            return bytes(16)
        return blake2b(b"".join([part.facts() for part in self._parts]), digest_size=16).digest()

    def differ(self, channel: Any) -> None:
        """Let each part explain. All ranks of the channel must call this."""
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
