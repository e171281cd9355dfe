"""`Replicate`: all parameters on every rank; gradients are averaged by torch's DistributedDataParallel.

Invariant: the reducer is prepared at the start of every backward pass, and checked at its end. torch prepares
it in `DDP.forward` only. So in torch three programs silently leave gradients unsynchronised: two forwards
followed by two backwards, a backward outside `no_sync` of a forward inside it, and a backward of any method
other than forward (tests/strategies/test_gradient_sync.py). Reentrant checkpoints run nested passes. The
reducer finishes when the first of them has all gradients; later gradients are averaged here, at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import call_of
from fabric.core._torch import backward_pass, tensor_of
from fabric.core.backward_listeners import add_backward_listener, add_step_listener, leaves_of, parameters_of
from fabric.core.compile import uncompiled
from fabric.core.errors import UsageError
from fabric.core.torch_versions import BUFFER_KEYWORDS, buffers_off
from fabric.core.traits import Traits
from fabric.strategies.buffers import broadcast_buffers, shared_buffers
from fabric.strategies.ddp._torch import (
    NOT_AVERAGED,
    accumulator_of,
    build_buckets,
    check_reduced,
    disarm,
    has_built_buckets,
    leave_out,
    renew_reducer,
    restore_comm_hooks,
    running_node,
)
from fabric.strategies.ddp.replica_state import ReplicaState
from fabric.strategies.ddp.shared import SharedParameters, replicas_reducing
from fabric.strategies.layout import Layout
from fabric.strategies.tensor_sync import (
    average_gradients,
    broadcast_from_group_root,
    differing,
    grad_version,
    on_any_rank,
)
from fabric.utilities.init import name_of, names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.nn.parallel import DistributedDataParallel

    from fabric.collectives.channel import Channel
    from fabric.core.topology import Topology


class Replicate(Layout):
    """DDP with bucket views by default: no copy of gradients to buckets, and 4 bytes less per parameter.

    Args:
        settings: Arguments of `torch.nn.parallel.DistributedDataParallel`, which override our defaults.
    """

    traits = Traits(needs_launch=True, data_parallel=True)

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        if not self._syncs_buffers:
            kinds = [kind for kind in self.traits.replicates if kind != "buffers"]
            self.traits = replace(self.traits, replicates=tuple(kinds))
        # In the order of setup, since collectives of several replicas must have the same order on all ranks.
        self._replicas: weakref.WeakKeyDictionary[DistributedDataParallel, ReplicaState]
        self._replicas = weakref.WeakKeyDictionary()
        self._frozen: list[tuple[str, weakref.ref[Parameter]]] = []
        self._remove_step_listener: Callable[[], None] | None = None
        """Removes the step listener; None: no gradients are unsynchronised, and there is no listener."""
        self._unsynced = self._failed = False
        self._num_replicas = 0
        """Number of replicas that were set up."""

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]

    @property
    def _syncs_buffers(self) -> bool:
        return all([self.settings.get(name, True) for name in BUFFER_KEYWORDS])

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module in DDP; itself if no parameter is trainable. All ranks must call this."""
        if any([hasattr(p, "device_mesh") for p in module.parameters()]):
            raise UsageError(
                f"{type(module).__name__} has parameters that are DTensors, whose gradients DDP cannot "
                'average. Pass a model that is not sharded to fabric.setup, or write strategy="fsdp" or '
                "ModelParallelStrategy(...)."
            )
        self._frozen += [
            (name, weakref.ref(p)) for name, p in module.named_parameters() if not p.requires_grad
        ]
        add_backward_listener(self)
        if not any([p.requires_grad for p in module.parameters()]):
            broadcast_from_group_root([*module.parameters(), *shared_buffers(module).values()], self._group())
            return module
        from torch.nn.parallel import DistributedDataParallel

        settings = self._keywords()
        if topology.device.type != "cpu" and "device_ids" not in settings:
            settings["device_ids"] = [topology.device.index]
        ignored = getattr(module, NOT_AVERAGED, [])
        synced = [p for name, p in module.named_parameters() if name not in ignored]
        broadcast_from_group_root([*synced, *shared_buffers(module).values()], self._group())
        replica = DistributedDataParallel(module, **settings)
        self._num_replicas += 1
        self._replica_of(replica)
        return replica

    def _keywords(self) -> dict[str, Any]:
        settings = {"gradient_as_bucket_view": True, **self.settings, "init_sync": False}
        settings.pop("static_graph", None)  # torch: silently leaves gradients unsynchronised
        # DDP broadcasts buffers by position before each forward. Here they are broadcast by name, at setup
        # and after training backwards, so that evaluation makes no collective.
        settings = {name: value for name, value in settings.items() if name not in BUFFER_KEYWORDS}
        from torch.nn.parallel import DistributedDataParallel

        return {**settings, **buffers_off(DistributedDataParallel)}

    def copied(self, model: Any) -> None:
        """Register the replica of a copied or unpickled model."""
        self._replica_of(model._fabric_wrapped)

    def reduced_parameters(self) -> set[int]:
        """Return the ids of the parameters of models as they were at setup, and of free parameters."""
        free = self.free_parameters.alive() if self.free_parameters else ()
        return {*free}.union(*[state.at_setup for state in self._replicas.values()])

    def unwrap(self, wrapped: Module) -> Module:
        """Return the user's module inside DDP."""
        replica = self._replica_of(wrapped)
        return wrapped if replica is None else replica.module

    @contextmanager
    def no_sync(self, wrapped: Module) -> Iterator[None]:
        """Context of DDP's no_sync; its replicas are marked as unsynchronised until a backward averages them.

        Ranks compare such gradients before a step or clip: the loop may have dropped or averaged them.
        """
        replica = self._replica_of(wrapped)
        if replica is None:
            yield
            return
        self._unsynced = True
        with ExitStack() as stack:
            for held in replicas_reducing(replica, self._replicas):
                self._replicas[held].manual = None
                self._keep_local(self._replicas[held])
                disarm(held.reducer)  # else it would reduce, if it was prepared for another pass
                stack.enter_context(held.no_sync())
            yield

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise if gradients that no backward has averaged differ between ranks. All ranks must call this.

        Raises:
            UsageError: They differ; on all ranks.
        """
        parameters = list(parameters)
        local = [state.at_setup for state in self._replicas.values() if state.is_unsynced()]
        self._compare([p for p in parameters if any([id(p) in held for held in local])], doing)

    def replaced_gradients(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the parameters whose gradients are not those that the last backward has averaged."""
        averaged: dict[int, int] = {}
        for state in self._replicas.values():
            averaged = {**averaged, **state.averaged} if averaged else state.averaged
        pairs = [(p, p.grad) for p in parameters]
        others = [(p, grad) for p, grad in pairs if averaged.get(id(p), id(grad)) != id(grad)]
        return [p for p, grad in others if grad is not None and not grad.is_sparse]

    def _compare(self, parameters: list[Any], doing: str) -> None:
        """Raise on all ranks if the gradients differ between them. All ranks must call this."""
        grads = [p.grad for p in parameters]
        if not grads or self.channel is None:
            return
        owners = names_of_owners(parameters, [replica.module for replica in self._replicas])
        self.channel.check_call(call_of(doing, f"of {owners}, with gradients that no backward has averaged"))
        if any(differing(grads, self.channel)):
            if backward_pass() != -1:
                raise UsageError(
                    f"{doing} was called in a hook of a backward, before gradients were averaged over ranks: "
                    "parameters would diverge. Call it after fabric.backward(loss)."
                )
            raise UsageError(
                f"{doing} was called with gradients that were never synchronised: all backwards ran under "
                "no_backward_sync(), or the loop has set p.grad (torch.autograd.grad). They differ between "
                "ranks, so parameters would diverge. Run the last backward of each step outside of "
                "no_backward_sync(), call zero_grad(), or average them: fabric.all_reduce(p.grad)."
            )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check gradients before a step of any optimizer, unless a closure computes them in the step."""
        if len(args) == 1 and not kwargs:
            self.check_synced(parameters_of(optimizer), f"{type(optimizer).__name__}.step()")

    def after_grad(self, inputs: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Mark replicas as unsynchronised for whose parameters the loop computed gradients itself.

        If it puts them into `.grad`, the next step compares them.
        """
        ids = {id(tensor) for tensor in inputs}
        for state in self._replicas.values():
            if not ids.isdisjoint(map(id, state.trained)) and (not state.local or state.manual is not None):
                state.mark_manual(grads)
                self._keep_local(state)

    def _keep_local(self, state: ReplicaState) -> None:
        """Mark a replica's gradients as unsynchronised: it is new, or its next backwards do not average."""
        state.local = True
        self._remove_step_listener = self._remove_step_listener or add_step_listener(self)

    def _replica_of(self, wrapped: Module) -> DistributedDataParallel | None:
        replica: DistributedDataParallel = uncompiled(wrapped)
        if type(replica).__name__ != "DistributedDataParallel":
            return None
        if replica not in self._replicas:
            restore_comm_hooks(replica)  # a copy has another reducer
            self._reduce(replica, ())  # without exclusions: the copy shares no parameters yet
            self._separate_shared(replica)
        return replica

    def _reduce(self, replica: DistributedDataParallel, reduced_elsewhere: Iterable[Tensor]) -> None:
        """Register a replica if it is new, and exclude parameters that another replica reduces."""
        state = self._replicas.get(replica)
        if state is None:
            state = self._replicas[replica] = ReplicaState(replica, self._syncs_buffers)
            self._keep_local(state)
        state.reduced_elsewhere.update(reduced_elsewhere)
        named = [pair for pair in state.named() if pair[1] not in state.reduced_elsewhere]
        state.names, state.trained = [name for name, _ in named], [p for _, p in named]
        leave_out(replica, state.reduced_elsewhere, state.trained)
        state.forget_views()
        for handle in state.hooks:
            handle.remove()
        # A backward reaches the last parameter first. With unused parameters the first may differ by rank.
        trainable = [p for p in state.trained if p.requires_grad]
        hooked = trainable if replica.find_unused_parameters else trainable[-1:]
        # By id: a node refers to its parameter, so a hook that refers to the node would be a cycle.
        state.nodes = {id(p): accumulator_of(p) for p in hooked}
        received = partial(self._received_grad, weakref.ref(replica))
        state.hooks = [p.register_post_accumulate_grad_hook(received) for p in hooked]

    def _separate_shared(self, replica: DistributedDataParallel) -> None:
        """Move parameters that the model shares with other models to a separate replica."""
        trained = {*self._replicas[replica].trained}
        for other, state in [pair for pair in self._replicas.items() if pair[0] is not replica]:
            both = {p: name for name, p in state.named() if p in trained}
            if both:
                module = SharedParameters(both, other.module, replica.module)
                common = type(replica)(module, **self._keywords())
                for one in (other, replica):
                    self._replicas[one].shared.append(common)
                    self._reduce(one, both)
                self._reduce(common, ())

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Prepare every replica's reducer, run the pass, and check that each reduction finished.

        Raises:
            UsageError: Parameters got no gradient, so gradients could not be averaged; with their names.
        """
        held = [(name, tensor_of(ref)) for name, ref in self._frozen]
        thawed = [(name, p, grad_version(p)) for name, p in held if p is not None and p.requires_grad]
        syncing = [r for r in self._replicas if r.require_backward_grad_sync and r.reducer is not None]
        start = [t for t in (tensors if isinstance(tensors, Sequence) else [tensors]) if torch.is_tensor(t)]
        trained = {id(p) for r in syncing for p in self._replicas[r].trained} if self._failed else set()
        # Only in passes of these models: a layout without references may be collected on some ranks only.
        if trained and self.channel is not None and any(id(leaf) in trained for leaf in leaves_of(start)):
            self._failed = False
            self.channel.check_call(
                call_of("backward after one that failed")
            )  # it may have failed on some ranks
        local = [(state, state.grad_versions()) for r in syncing if (state := self._replicas[r]).local]
        # Frozen since the forward: backward computes no gradient, and the reducer would write zeros.
        frozen = [p for r in syncing for p in self._replicas[r].trained if not p.requires_grad]
        without_grad = [p for p in frozen if p.grad is None]
        for replica in syncing:
            state = self._replicas[replica]
            state.received_grad, state.versions_at_reduction = False, None
            if [*map(torch.Tensor.data_ptr, state.views)] != state.pointers:
                state.restore_views()
            replica.reducer.prepare_for_backward(start if replica.find_unused_parameters else [])
        try:
            run(tensors, *args, **kwargs)
        except BaseException as error:
            failed = [replica for replica in syncing if not _is_finished(replica)]
            self.reset_reductions(failed)
            self._failed = self._failed or bool(failed)
            if isinstance(error, RuntimeError) and syncing:
                from fabric.strategies.error_translation import translate_ddp_error

                translate_ddp_error(error, graph=kwargs.get("create_graph") or True in args[2:3])
            raise
        received = [replica for replica in syncing if self._replicas[replica].received_grad]
        self.collective_backward = getattr(self.gate, "open", False) or bool(received)
        for replica in syncing:
            if self._replicas[replica].versions_at_reduction is not None:
                self._average_late_gradients(self._replicas[replica])
        for name in [name for name, p, before in thawed if grad_version(p) != before]:
            from fabric.strategies.error_translation import unfrozen_after_setup

            raise unfrozen_after_setup(name)
        if local:
            self._update_unsynced(local)
        for parameter in without_grad:
            parameter.grad = None
        for replica in syncing:
            self._finish_reduction(replica)
        self._broadcast_buffers(syncing)

    def reset_reductions(self, replicas: list[DistributedDataParallel] | None = None) -> None:
        """Renew reducers: after errors on some ranks their buckets differ. All ranks must call this."""
        for replica in [*self._replicas] if replicas is None else replicas:
            state = self._replicas[replica]
            state.forget_views()
            if replicas is None:  # else this rank alone may have failed, and would compare alone
                state.manual = None
                self._keep_local(state)
            renew_reducer(replica, state.trained, free=replicas is None)

    def _broadcast_buffers(self, syncing: list[DistributedDataParallel]) -> None:
        """Broadcast buffers after a training backward; DDP does it before each forward."""
        for replica in syncing:
            state = self._replicas[replica]
            if replica.training and state.received_grad and state.buffers is not None:
                broadcast_buffers([state.buffers], self.channel)
        modules = [replica.module for replica in syncing if self._replicas[replica].received_grad]
        if self.after_sync is not None and modules and self.traits.lockstep:  # none: on this rank alone
            self.after_sync(modules)

    def _update_unsynced(self, before: list[tuple[ReplicaState, list[Any]]]) -> None:
        """Unmark the replicas whose gradients the backward averaged; remove the listener if none is left."""
        for state, grad_versions in before:
            state.local = grad_versions == state.grad_versions()
            state.manual = state.manual if state.local else None
        local = self._unsynced or any([state.local for state in self._replicas.values()])
        if self._remove_step_listener is not None and not local:
            self._remove_step_listener()  # so a loop that always averages has no cost per step
            self._remove_step_listener = None

    def _finish_reduction(self, replica: DistributedDataParallel) -> None:
        try:
            check_reduced(replica)
        except RuntimeError as error:
            from fabric.strategies.error_translation import missing_gradients_error

            state = self._replicas[replica]
            raise missing_gradients_error(replica.module, state.names, state.trained, error) from error
        if has_built_buckets(replica):
            disarm(replica.reducer)
        elif self._replicas[replica].received_grad and not replica.find_unused_parameters:
            build_buckets(replica)  # here, and not in the next forward, which other ranks may not make
        state = self._replicas[replica]
        if state.received_grad and state.has_bucket_views and len(state.views) < len(state.trained):
            state.record_views()

    def _group(self) -> Channel:
        if self.channel is None:
            raise UsageError(
                "The strategy was torn down. Create a new Fabric, and set the optimizer up again."
            )
        return self.channel

    def teardown(self) -> None:
        """Release the process group; replicas cannot run after this."""
        # Its threads could free a tensor during interpreter shutdown, and the process would exit by SIGABRT.
        for replica in self._replicas:
            replica.__dict__.update(reducer=None, logger=None, process_group=None)
        self._frozen.clear()

    def _received_grad(self, ref: weakref.ref[DistributedDataParallel], parameter: Tensor) -> None:
        """Hook: record that a backward pass wrote the gradient of a replica's parameter.

        Raises:
            UsageError: The model was converted: the writing graph node is not the one with DDP's hook.
        """
        if (replica := ref()) is None:
            return
        state = self._replicas[replica]
        synced = replica.require_backward_grad_sync and not replica.find_unused_parameters
        if synced and not state.received_grad:
            state.passes += 1
            # Before the first bucket: gloo aborts the process if ranks reduce models of different sizes.
            if self._num_replicas > 1 and not state.passes & (state.passes - 1) and self.channel is not None:
                self.channel.check_call(call_of("backward", f"of {name_of(replica.module)}"))
        state.received_grad = True
        if running_node() not in (state.nodes[id(parameter)], None):
            from fabric.strategies.error_translation import converted_after_setup

            names = {id(p): name for name, p in replica.module.named_parameters()}
            raise converted_after_setup(names[id(parameter)], parameter)

    def after_nested_pass(self) -> None:
        """If a reducer finished inside of a pass, record the gradients' versions at that time."""
        for replica, state in self._replicas.items():
            # A gradient was written, and the reducer waits for no other one.
            if state.received_grad and state.versions_at_reduction is None and _is_finished(replica):
                state.versions_at_reduction = state.grad_versions()

    def _average_late_gradients(self, state: ReplicaState) -> None:
        """At the end of a pass: average gradients if any rank added to them after their reduction.

        A gradient is then the mean, equal on all ranks, plus the local addition. Its mean over ranks is the
        sum of both means. All ranks call this, since a nested pass finished the reduction on all of them.
        """
        changed = state.versions_at_reduction != state.grad_versions()
        channel: Any = self.channel
        if any(on_any_rank([changed], channel)):
            trained = [p for p in state.trained if p.requires_grad]
            average_gradients(trained, channel, "DDP with reentrant checkpoints")


def _is_finished(replica: DistributedDataParallel) -> bool:
    """Whether the replica's reducer expects no more gradients."""
    try:
        check_reduced(replica)
    except RuntimeError:
        return False
    return True
