"""`Replicate`: every rank holds all parameters; gradients are averaged (torch's DistributedDataParallel).

Invariant: the reducer is armed at the start of every `fabric.backward`, and checked at its end. torch arms it
in `DDP.forward` only, so that two forwards with two backwards, a backward outside `no_sync` of a forward
inside it, and any method other than forward silently leave gradients unsynchronised (measured:
tests/equivalence/test_gradient_sync.py). Reentrant checkpoints run passes inside of the pass; the reducer
takes the first that is complete for the whole, and what comes after it is averaged here, at the end.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.errors import UsageError
from fabric.core.traits import Traits
from fabric.strategies.layouts.agree import average_gradients, on_any_rank
from fabric.strategies.layouts.hooked import HookedCall, broadcast_from_zero
from fabric.strategies.layouts.replica_errors import (
    TWICE,
    marked_twice,
    not_static,
    refuse_retired,
    thawed_late,
    unused_parameters,
)
from fabric.strategies.layouts.whole import Whole
from fabric.utilities.compile import is_compiled
from fabric.utilities.nested_backward import attend_nested_passes, here, outermost_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from fabric.core.topology import Topology

_BUFFER_KEYWORDS = ("broadcast_buffers", "forward_sync_buffers")
"""DDP's switch for buffers; torch 2.13 renamed it."""


class Replicate(Whole):
    """DDP with bucket views by default (gradients live in the communication buckets: no copy, 4 bytes less a
    parameter).

    Args:
        settings: Keywords of `torch.nn.parallel.DistributedDataParallel`; they win over our defaults.
    """

    traits = Traits(
        needs_launch=True, data_parallel=True, start_methods=("popen", "spawn", "fork", "forkserver")
    )

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        # By number, in the order of setup: collectives of several replicas need one order on all ranks.
        self._replicas: weakref.WeakValueDictionary[int, DistributedDataParallel] = (
            weakref.WeakValueDictionary()
        )
        self._numbers = itertools.count()
        self._buffered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._synced_in: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
        self.reached: set[int] = set()
        self._frozen: list[tuple[str, weakref.ref[Parameter]]] = []
        self._reduced: weakref.WeakKeyDictionary[Module, _Reduced] = weakref.WeakKeyDictionary()
        self._retired: weakref.WeakSet[Module] = weakref.WeakSet()
        self.in_backward = False

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """DDP around the module. All ranks must call this; a module without trainable parameters is not
        wrapped.
        """
        if any([hasattr(p, "device_mesh") for p in module.parameters()]):
            raise UsageError(
                f"{type(module).__name__} has parameters that are split over ranks (DTensor), which DDP "
                'cannot average. Set up a plain model, or write strategy="fsdp" or '
                "ModelParallelStrategy(...)."
            )
        self._frozen += [
            (name, weakref.ref(p)) for name, p in module.named_parameters() if not p.requires_grad
        ]
        if not any([p.requires_grad for p in module.parameters()]):
            broadcast_from_zero([*module.parameters(), *module.buffers()])
            return module
        from torch.nn.parallel import DistributedDataParallel

        settings = {"gradient_as_bucket_view": True, **self.settings}
        for name in _BUFFER_KEYWORDS:
            settings.pop(name, None)
        # Buffers are kept alike by us, after training backwards, so that evaluation makes no collective.
        renamed = _BUFFER_KEYWORDS[1] in inspect.signature(DistributedDataParallel).parameters
        settings[_BUFFER_KEYWORDS[renamed]] = False
        if topology.device.type != "cpu" and "device_ids" not in settings:
            settings["device_ids"] = [topology.device.index]
        broadcast_from_zero(list(module.buffers()))
        replica = DistributedDataParallel(module, **settings)
        self.adopt(replica)
        return replica

    def adopt(self, wrapped: Module) -> None:
        """Take in a replica that came to be by copying or unpickling a model."""
        replica = self._replica_of(wrapped)
        if replica is not None and replica.static_graph:
            # A copy has a new reducer; torch takes its first backward for a later one, and reduces nothing.
            replica._static_graph_delay_allreduce_enqueued = False

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The user's own optimizer.

        Raises:
            UsageError: It trains parameters that came into a model after its setup.
        """
        if self._replicas:
            self.check_added([p for group in optimizer.param_groups for p in group["params"]])
        return optimizer

    def check_added(self, parameters: list[Tensor]) -> None:
        """Raise if a parameter was in no model at its setup: DDP averages only those that it knew then."""
        known = set().union(*[replica.__dict__["_fabric_ids"] for replica in self._replicas.values()])
        foreign = [tuple(p.shape) for p in parameters if p.requires_grad and id(p) not in known]
        if foreign:
            raise UsageError(
                f"{len(foreign)} parameters (shapes {', '.join(map(str, foreign[:3]))}) were in no model "
                "when it was set up, and their gradients would not be averaged over ranks. Add layers "
                "before fabric.setup."
            )

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module inside DDP."""
        replica = self._replica_of(wrapped)
        return wrapped if replica is None else replica.module

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """DDP's own call; with buffers (batch norm), hooked so that a plain `loss.backward()` syncs them."""
        replica = self._replica_of(wrapped)
        if replica is not None and replica in self._buffered:
            return HookedCall(wrapped.__call__, self, replica, arms=False)
        return wrapped.__call__

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """The method, hooked so that a plain `loss.backward()` through its outputs is synchronised."""
        replica = self._replica_of(wrapped)
        return method if replica is None else HookedCall(method, self, replica, arms=True)

    @contextmanager
    def no_sync(self, wrapped: Module) -> Iterator[None]:
        """DDP's no_sync."""
        replica = self._replica_of(wrapped)
        if replica is None:
            yield
            return
        if replica.static_graph:
            raise UsageError(
                "DDPStrategy(static_graph=True) cannot skip the gradient sync of a backward: torch aborts "
                "the process. Remove static_graph=True, or no_backward_sync()."
            )
        with replica.no_sync():
            yield
        replica.__dict__.get("_fabric_marks", {}).clear()  # a forward inside did not arm the reducer

    def _replica_of(self, wrapped: Module) -> DistributedDataParallel | None:
        while is_compiled(wrapped):
            wrapped = wrapped._orig_mod  # type: ignore[assignment]
        if type(wrapped).__name__ != "DistributedDataParallel":
            return None
        replica: DistributedDataParallel = wrapped  # type: ignore[assignment]
        if not any([known is replica for known in self._replicas.values()]):
            self._take_in(replica)
        return replica

    def _take_in(self, replica: DistributedDataParallel) -> None:
        names = [name for name, p in replica.module.named_parameters() if p.requires_grad]
        replica.__dict__.setdefault("_fabric_names", names)
        replica.__dict__["_fabric_ids"] = {id(p) for p in replica.module.parameters()}
        self._replicas[next(self._numbers)] = replica
        wanted = all([self.settings.get(name, True) for name in _BUFFER_KEYWORDS])
        if wanted and next(replica.buffers(), None) is not None:
            self._buffered.add(replica)
        if dist.get_world_size(replica.process_group) > 1:
            PlainBackwardWatch(self, replica)
            attend_nested_passes(self)

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Arm every replica's reducer, run the backward, and check that each reduction finished.

        Raises:
            UsageError: Parameters got no gradient, so the ranks' gradients could not be averaged; names them.
        """
        frozen = [(name, p) for name, ref in self._frozen if (p := ref()) is not None]
        thawed = [(name, p, _stamp(p)) for name, p in frozen if p.requires_grad]
        syncing = []
        for replica in self._replicas.values():
            if (
                replica.require_backward_grad_sync
                and not replica.static_graph
                and replica not in self._retired
            ):
                start = [tensor] if replica.find_unused_parameters else []
                replica.reducer.prepare_for_backward(start)
                syncing.append(replica)
        self.in_backward = True
        try:
            run(tensor, *args, **kwargs)
        except BaseException as error:
            twice = isinstance(error, RuntimeError) and any([sign in str(error) for sign in TWICE])
            if twice:
                self._retire([replica for replica in syncing if not _is_finished(replica)])
            # Of these torch counts gradients, in the first pass for all later ones.
            self._retire([replica for replica in self._replicas.values() if replica.static_graph])
            if twice:
                raise marked_twice(syncing, error) from error
            raise
        finally:
            self.in_backward = False
        for name, parameter, stamp in thawed:
            if _stamp(parameter) != stamp:  # this backward went through it
                raise thawed_late(name)
        for replica in syncing:
            try:
                replica._check_reducer_finalized()
            except RuntimeError as error:
                raise unused_parameters(replica, error) from error
            # Here, where all ranks are, and not in whichever forward comes next on each of them.
            replica._has_rebuilt_buckets |= replica.reducer._rebuild_buckets()
        # Only of those that this backward went through: that is so on all ranks or on none.
        for replica in self._replicas.values():
            if replica not in self._buffered or id(replica) not in self.reached:
                continue
            if replica.training and replica.require_backward_grad_sync:
                broadcast_from_zero(list(replica.buffers()))
        self.reached.clear()

    def teardown(self) -> None:
        """Let go of the process group; replicas cannot run after this.

        A group that a reducer holds outlives its destruction, and with it the backend's threads. One that
        drops a tensor while the interpreter ends asks for the GIL there, which ends the process by SIGABRT.
        """
        for replica in self._replicas.values():
            for name in ("reducer", "logger", "process_group"):
                replica.__dict__[name] = None
        self._frozen.clear()

    def on_plain_backward(self, replica: DistributedDataParallel, arms: bool) -> None:
        """A plain `loss.backward()` has reached an output: arm the reducer, and sync buffers at its end.

        Raises:
            UsageError: The gradients would stay unsynchronised.
        """
        if self.in_backward:
            self.reached.add(id(replica))
            return
        if not replica.require_backward_grad_sync:
            return
        if arms and (replica.find_unused_parameters or replica.static_graph):
            raise UsageError(
                "loss.backward() went through a method other than forward under find_unused_parameters or "
                "static_graph, where gradients would stay unsynchronised. Write fabric.backward(loss), or "
                "call model.forward."
            )
        if arms:
            self._arm(replica)
        running = torch._C._current_graph_task_id()
        if replica.training and replica in self._buffered and self._synced_in.get(replica) != running:
            self._synced_in[replica] = running
            sync = partial(broadcast_from_zero, list(replica.buffers()))
            torch.autograd.Variable._execution_engine.queue_callback(sync)

    def after_nested_pass(self) -> None:
        """If a reducer has finished inside of a pass, watch for what that pass still adds to gradients."""
        running = outermost_pass()
        for replica in self._replicas.values():
            known = self._reduced.get(replica)
            if (known is None or known.within != running) and _has_reduced(replica, running):
                self._reduced[replica] = _Reduced(running, [_stamp(p) for p in replica.parameters()])
                end = partial(self._average_rest, replica)
                torch.autograd.Variable._execution_engine.queue_callback(end)

    def _average_rest(self, replica: DistributedDataParallel) -> None:
        """At the end of a pass: average gradients that have grown after their reduction, on any rank.

        They are the mean, the same on all ranks, and what each rank has added; the mean of that is the sum of
        both means. Ranks may differ in what they add, but not in that a pass inside has reduced.
        """
        parameters = list(replica.parameters())
        grown = self._reduced.pop(replica).stamps != [_stamp(p) for p in parameters]
        channel: Any = self.channel
        if any(on_any_rank([grown], channel)):
            trained = [p for p in parameters if p.requires_grad]
            average_gradients(trained, channel, "DDP with reentrant checkpoints")

    def _retire(self, replicas: list[DistributedDataParallel]) -> None:
        """Leave alone what can no more be used: reductions under way would write into later gradients."""
        for replica in replicas:
            self._retired.add(replica)
            replica.register_forward_pre_hook(refuse_retired)

    def _arm(self, replica: DistributedDataParallel) -> None:
        replica.__dict__.get("_fabric_marks", {})[replica] = ()
        try:
            replica.reducer.prepare_for_backward([])
        except RuntimeError as error:
            # A forward armed it for this same pass and gradients are on their way: nothing is left to do.
            if "Expected to have finished reduction" not in str(error):
                raise


class _Reduced(NamedTuple):
    """A reduction that was complete inside of a backward pass."""

    within: int
    """The number of the pass."""
    stamps: list[Any]
    """Of the gradients, as the reduction left them."""


class PlainBackwardWatch:
    """Refuses a plain `loss.backward()` that would leave a replica's gradients unsynchronised.

    torch arms the reducer in `DDP.forward` and says nothing of a backward that no forward armed. The hook on
    one parameter sees every backward; the mark that a forward leaves is set by a hook without a Python frame
    (`dict.__setitem__` takes just what a forward pre-hook is given), so that the forward costs nothing.
    """

    def __init__(self, layout: Replicate, replica: DistributedDataParallel) -> None:
        self.layout = layout
        self.replica = weakref.ref(replica)
        marks: dict[Any, Any] = {}
        # On the replica, not here: the marks refer to it, and it must be able to go.
        replica.__dict__["_fabric_marks"] = marks
        for key, hook in list(replica._forward_pre_hooks.items()):
            if getattr(hook, "__name__", "") == "__setitem__":  # came along with a copy
                del replica._forward_pre_hooks[key]
        replica.register_forward_pre_hook(marks.__setitem__)
        last = [p for p in replica.parameters() if p.requires_grad][-1]
        last.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        """A backward pass wrote a gradient of the replica.

        Raises:
            UsageError: Nothing armed the reducer for it.
        """
        replica = self.replica()
        if replica is None:
            return
        armed = replica.__dict__["_fabric_marks"].pop(replica, None) is not None
        running = torch._C._current_graph_task_id()
        outermost = running if here.outermost == -1 else here.outermost  # here, as a call costs more
        again = replica.__dict__.get("_fabric_pass", -1) >= outermost
        replica.__dict__["_fabric_pass"] = running
        if replica.static_graph and not (armed or again):
            raise not_static(replica)
        if self.layout.in_backward:
            if not replica.find_unused_parameters:  # else a parameter may rest on one rank and not on another
                self.layout.reached.add(id(replica))
            return
        if armed or again or not replica.require_backward_grad_sync:
            return
        raise UsageError(
            f"loss.backward() was called where it leaves the gradients of {type(replica.module).__name__} "
            "unsynchronised: a second backward after one forward, a forward under no_backward_sync, or a "
            "part of the model called by itself. Write fabric.backward(loss) instead."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainBackwardWatch:
        return self


def _has_reduced(replica: DistributedDataParallel, running: int) -> bool:
    """Whether the gradients of this backward pass, which runs still, are averaged already."""
    reached = replica.__dict__.get("_fabric_pass", -1) >= running  # the last parameter, which it starts with
    return (
        reached and replica.require_backward_grad_sync and not replica.static_graph and _is_finished(replica)
    )


def _is_finished(replica: DistributedDataParallel) -> bool:
    """Whether its reducer waits for no gradient."""
    try:
        replica._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _stamp(parameter: Tensor) -> Any:
    """Something that changes when a gradient is accumulated: in place, or as the first one."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)
