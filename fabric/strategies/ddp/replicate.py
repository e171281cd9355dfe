"""`Replicate`: every rank holds all parameters; gradients are averaged (torch's DistributedDataParallel).

Invariant: the reducer is armed at the start of every backward pass, and checked at its end. torch arms it in
`DDP.forward` only. Two forwards with two backwards silently leave gradients unsynchronised. So do
a backward outside `no_sync` of a forward inside it, and any method other than forward (measured:
tests/strategies/test_gradient_sync.py). Reentrant checkpoints run passes inside of the pass; the reducer
takes the first that is complete for the whole, and what comes after it is averaged here, at the end.
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
from fabric.core._torch import tensor_of
from fabric.core.backward_listeners import add_backward_listener, add_step_listener, leaves_of, parameters_of
from fabric.core.compile import uncompiled
from fabric.core.errors import UsageError
from fabric.core.torch_versions import BUFFER_KEYWORDS, buffers_off
from fabric.core.traits import Traits
from fabric.strategies.buffers import SyncedBuffers, broadcast_buffers, shared_buffers
from fabric.strategies.ddp._torch import (
    NOT_AVERAGED,
    accumulator_of,
    build_buckets,
    check_reduced,
    disarm,
    has_built_buckets,
    hook_again,
    leave_out,
    renew_reducer,
    running_node,
)
from fabric.strategies.ddp.shared import SharedParameters, reducing
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
    """DDP with bucket views by default (gradients live in the communication buckets: no copy, 4 bytes less a
    parameter).

    Args:
        settings: Keywords of `torch.nn.parallel.DistributedDataParallel`; they win over our defaults.
    """

    traits = Traits(needs_launch=True, data_parallel=True)

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        if not self._syncs_buffers:
            kinds = [kind for kind in self.traits.replicates if kind != "buffers"]
            self.traits = replace(self.traits, replicates=tuple(kinds))
        # In the order of setup: collectives of several replicas need one order on all ranks.
        self._replicas: weakref.WeakKeyDictionary[DistributedDataParallel, _Known]
        self._replicas = weakref.WeakKeyDictionary()
        self._frozen: list[tuple[str, weakref.ref[Parameter]]] = []
        self._unwatch: Callable[[], None] | None = None
        """What ends the look at each step; None: no gradients were local since all were averaged."""
        self._unsynced = self._failed = False
        self._models = 0
        """How many replicas were set up."""

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]

    @property
    def _syncs_buffers(self) -> bool:
        return all([self.settings.get(name, True) for name in BUFFER_KEYWORDS])

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
        add_backward_listener(self)
        if not any([p.requires_grad for p in module.parameters()]):
            broadcast_from_group_root([*module.parameters(), *shared_buffers(module).values()], self._group())
            return module
        from torch.nn.parallel import DistributedDataParallel

        settings = self._keywords()
        if topology.device.type != "cpu" and "device_ids" not in settings:
            settings["device_ids"] = [topology.device.index]
        ignored = getattr(module, NOT_AVERAGED, [])
        sent = [p for name, p in module.named_parameters() if name not in ignored]
        broadcast_from_group_root([*sent, *shared_buffers(module).values()], self._group())
        replica = DistributedDataParallel(module, **settings)
        self._models += 1
        self._replica_of(replica)
        return replica

    def _keywords(self) -> dict[str, Any]:
        settings = {"gradient_as_bucket_view": True, **self.settings, "init_sync": False}
        # torch's static graphs reduce nothing, without a word, where a backward is not as the first one was.
        settings.pop("static_graph", None)
        # DDP sends buffers by their positions. Here they are sent by name, at setup and after training
        # backwards, so that evaluation makes no collective.
        settings = {name: value for name, value in settings.items() if name not in BUFFER_KEYWORDS}
        from torch.nn.parallel import DistributedDataParallel

        return {**settings, **buffers_off(DistributedDataParallel)}

    def copied(self, model: Any) -> None:
        """Register the replica of a copied or unpickled model."""
        self._replica_of(model._fabric_joined)

    def reduced(self) -> set[int]:
        """Ids of the parameters of models as they were at setup, and of free parameters."""
        free = self.free_parameters.alive() if self.free_parameters else ()
        return {*free}.union(*[known.at_setup for known in self._replicas.values()])

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module inside DDP."""
        replica = self._replica_of(wrapped)
        return wrapped if replica is None else replica.module

    @contextmanager
    def no_sync(self, wrapped: Module) -> Iterator[None]:
        """DDP's no_sync; what it leaves is known until a backward averages it.

        Before such gradients are stepped with or clipped, ranks compare them: a loop may have dropped them,
        or averaged them itself. A loop that averages before each step compares nothing.
        """
        replica = self._replica_of(wrapped)
        if replica is None:
            yield
            return
        self._unsynced = True
        with ExitStack() as stack:
            for held in reducing(replica, self._replicas):
                self._keep_local(self._replicas[held])
                disarm(held.reducer)  # armed for a pass that is not this one it would reduce
                stack.enter_context(held.no_sync())
            yield

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise on all ranks if gradients that no backward has averaged differ between them. All ranks.

        Raises:
            UsageError: They do.
        """
        parameters = list(parameters)
        local = [known.at_setup for known in self._replicas.values() if known.local]
        grads = [p.grad for p in parameters if any([id(p) in held for held in local])]
        if not grads or self.channel is None:
            return
        owners = names_of_owners(parameters, [replica.module for replica in self._replicas])
        self.channel.check_call(call_of(doing, f"of {owners}, with gradients that no backward has averaged"))
        if any(differing(grads, self.channel)):
            raise UsageError(
                f"{doing} came while gradients of backwards under no_backward_sync(), or put there by hand "
                "(torch.autograd.grad), were never synchronised: they differ between ranks, which would step "
                "apart. Let the last backward of each step run outside of it, call zero_grad() to drop them, "
                "or average them: fabric.all_reduce(p.grad)."
            )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer; a closure makes gradients in the step."""
        if len(args) == 1 and not kwargs:
            self.check_synced(parameters_of(optimizer), f"{type(optimizer).__name__}.step()")

    def _keep_local(self, known: _Known) -> None:
        """The replica's next backwards average nothing; or it is new, and none has averaged anything yet."""
        known.local = True
        self._unwatch = self._unwatch or add_step_listener(self)

    def _replica_of(self, wrapped: Module) -> DistributedDataParallel | None:
        replica: DistributedDataParallel = uncompiled(wrapped)
        if type(replica).__name__ != "DistributedDataParallel":
            return None
        if replica not in self._replicas:
            hook_again(replica)  # a copy has another reducer
            self._reduce(replica, ())  # which may leave out what another model of the original has
            self._separate_shared(replica)
        return replica

    def _reduce(self, replica: DistributedDataParallel, elsewhere: Iterable[Tensor]) -> None:
        """Let a replica, perhaps a new one, leave out what is reduced elsewhere."""
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Known(replica, self._syncs_buffers)
            self._keep_local(known)
        known.elsewhere.update(elsewhere)
        own = [pair for pair in known.named() if pair[1] not in known.elsewhere]
        known.names, known.trained = [name for name, _ in own], [p for _, p in own]
        leave_out(replica, known.elsewhere, known.trained)
        known.views, known.pointers = {}, []
        for handle in known.hooks:
            handle.remove()
        # Passes begin with the last; which rest may differ between ranks where some are unused.
        thawed = [p for p in known.trained if p.requires_grad]
        heard = thawed if replica.find_unused_parameters else thawed[-1:]
        # The node keeps its parameter, whose hook must not have it.
        known.nodes = {id(p): accumulator_of(p) for p in heard}
        received = partial(self._received_grad, weakref.ref(replica))
        known.hooks = [p.register_post_accumulate_grad_hook(received) for p in heard]

    def _separate_shared(self, replica: DistributedDataParallel) -> None:
        """Give parameters that another model has, too, to a replica of their own."""
        own = {*self._replicas[replica].trained}
        for other, known in [pair for pair in self._replicas.items() if pair[0] is not replica]:
            both = {p: name for name, p in known.named() if p in own}
            if both:
                module = SharedParameters(both, other.module, replica.module)
                common = type(replica)(module, **self._keywords())
                for one in (other, replica):
                    self._replicas[one].shared.append(common)
                    self._reduce(one, both)
                self._reduce(common, ())

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Arm every replica's reducer, run the pass, and check that each reduction finished.

        Raises:
            UsageError: Parameters got no gradient, so the ranks' gradients could not be averaged; names them.
        """
        held = [(name, tensor_of(ref)) for name, ref in self._frozen]
        thawed = [(name, p, grad_version(p)) for name, p in held if p is not None and p.requires_grad]
        syncing = [r for r in self._replicas if r.require_backward_grad_sync and r.reducer is not None]
        start = [t for t in (tensors if isinstance(tensors, Sequence) else [tensors]) if torch.is_tensor(t)]
        trained = {id(p) for r in syncing for p in self._replicas[r].trained} if self._failed else set()
        # Not in passes of other models: if this layout is garbage, it may be collected on some ranks only.
        if trained and self.channel is not None and any(id(leaf) in trained for leaf in leaves_of(start)):
            self._failed = False
            self.channel.check_call(call_of("backward after one that failed"))  # perhaps on some ranks only
        local = [(known, known.stamps()) for r in syncing if (known := self._replicas[r]).local]
        # Frozen since a forward: torch's backward leaves them out, and the reducer would give them zeros.
        frozen = [p for r in syncing for p in self._replicas[r].trained if not p.requires_grad]
        resting = [p for p in frozen if p.grad is None]
        for replica in syncing:
            known = self._replicas[replica]
            known.received_grad, known.reduced = False, None
            if [*map(torch.Tensor.data_ptr, known.views)] != known.pointers:
                known.restore_views()
            replica.reducer.prepare_for_backward(start if replica.find_unused_parameters else [])
        try:
            run(tensors, *args, **kwargs)
        except BaseException as error:
            for replica in [replica for replica in syncing if not _is_finished(replica)]:
                renew_reducer(replica, self._replicas[replica].trained)
                self._replicas[replica].views = {}
                self._failed = True
            if isinstance(error, RuntimeError) and syncing:
                from fabric.strategies.error_translation import translate_ddp_error

                translate_ddp_error(error, graph=kwargs.get("create_graph") or True in args[2:3])
            raise
        received = [replica for replica in syncing if self._replicas[replica].received_grad]
        self.collective_backward = getattr(self.gate, "open", False) or bool(received)
        for replica in syncing:
            if self._replicas[replica].reduced is not None:
                self._average_rest(self._replicas[replica])
        for name in [name for name, p, before in thawed if grad_version(p) != before]:
            from fabric.strategies.error_translation import unfrozen_after_setup

            raise unfrozen_after_setup(name)
        if local:
            self._averaged(local)
        for parameter in resting:
            parameter.grad = None
        for replica in syncing:
            self._end(replica)
        self._finish(syncing)

    def _finish(self, syncing: list[DistributedDataParallel]) -> None:
        """Send buffers, where all ranks are: DDP sends them before each forward, evaluation included."""
        for replica in syncing:
            known = self._replicas[replica]
            if replica.training and known.received_grad and known.buffers is not None:
                broadcast_buffers([known.buffers], self.channel)
        if self.after_sync is not None and syncing and self.traits.lockstep:
            self.after_sync([replica.module for replica in syncing if self._replicas[replica].received_grad])

    def _averaged(self, before: list[tuple[_Known, list[Any]]]) -> None:
        """A backward has averaged the gradients of those that it came to."""
        for known, stamps in before:
            known.local = stamps == known.stamps()
        local = self._unsynced or any([known.local for known in self._replicas.values()])
        if self._unwatch is not None and not local:  # a loop that always averages pays for no look
            self._unwatch()
            self._unwatch = None

    def _end(self, replica: DistributedDataParallel) -> None:
        try:
            check_reduced(replica)
        except RuntimeError as error:
            from fabric.strategies.error_translation import missing_gradients_error

            raise missing_gradients_error(replica.module, self._replicas[replica].names, error) from error
        if has_built_buckets(replica):
            disarm(replica.reducer)
        elif self._replicas[replica].received_grad and not replica.find_unused_parameters:
            build_buckets(replica)  # here, where all ranks are, and not in whichever forward comes next
        known = self._replicas[replica]
        if known.received_grad and known.bucketed and len(known.views) < len(known.trained):
            known.note_views()

    def _group(self) -> Channel:
        if self.channel is None:
            raise UsageError("The strategy was torn down. Make a new Fabric, and set the optimizer up again.")
        return self.channel

    def teardown(self) -> None:
        """Let go of the process group; replicas cannot run after this.

        A group that a reducer holds outlives its destruction, and with it the backend's threads. One that
        drops a tensor while the interpreter ends asks for the GIL there, which ends the process by SIGABRT.
        """
        for replica in self._replicas:
            replica.__dict__.update(reducer=None, logger=None, process_group=None)
        self._frozen.clear()

    def _received_grad(self, ref: weakref.ref[DistributedDataParallel], parameter: Tensor) -> None:
        """A backward pass wrote the gradient of a replica's parameter.

        Raises:
            UsageError: By another node than at setup, of a conversion: the reducer has its hook at that one.
        """
        replica = ref()
        if replica is None:
            return
        known = self._replicas[replica]
        synced = replica.require_backward_grad_sync and not replica.find_unused_parameters
        if synced and not known.received_grad:
            known.passes += 1
            # Before the first bucket: gloo ends the process where two models of other sizes are reduced.
            if self._models > 1 and not known.passes & (known.passes - 1) and self.channel is not None:
                self.channel.check_call(call_of("backward", f"of {name_of(replica.module)}"))
        known.received_grad = True
        if running_node() not in (known.nodes[id(parameter)], None):
            from fabric.strategies.error_translation import converted_after_setup

            names = {id(p): name for name, p in replica.module.named_parameters()}
            raise converted_after_setup(names[id(parameter)], parameter)

    def after_nested_pass(self) -> None:
        """If a reducer has finished inside of a pass, note what that pass may still add to gradients."""
        for replica, known in self._replicas.items():
            # A parameter came, and now its reducer waits for no gradient.
            if known.received_grad and known.reduced is None and _is_finished(replica):
                known.reduced = known.stamps()

    def _average_rest(self, known: _Known) -> None:
        """At the end of a pass: average gradients that have grown after their reduction, on any rank.

        They are the mean, the same on all ranks, and what each rank has added; the mean of that is the sum of
        both means. Ranks may differ in what they add, but not in that a pass inside has reduced.
        """
        grown = known.reduced != known.stamps()
        channel: Any = self.channel
        if any(on_any_rank([grown], channel)):
            trained = [p for p in known.trained if p.requires_grad]
            average_gradients(trained, channel, "DDP with reentrant checkpoints")


class _Known:
    """Parameters, buffers and hooks of a replica, as they were when its reducer was made."""

    def __init__(self, replica: DistributedDataParallel, syncs_buffers: bool) -> None:
        named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.names, self.trained = [name for name, _ in named], [p for _, p in named]
        """What the reducer counts: those that were trainable then, and that no other model has."""
        self.elsewhere: set[Tensor] = set()
        """What others reduce: `shared`."""
        self.shared: list[DistributedDataParallel] = []
        self.hooks: list[Any] = []
        self.at_setup = {id(p) for p in replica.module.parameters()}
        synced = syncs_buffers and shared_buffers(replica.module)
        self.buffers = SyncedBuffers(replica.module) if synced else None
        """Those to keep alike."""
        self.nodes: dict[int, Any] = {}
        """Those that write the gradients that are looked at, by parameter."""
        self.local = False
        """Whether its gradients may be those of this rank only."""
        self.passes = 0
        """How many backwards came to it and synchronised."""
        self.received_grad = False
        """Whether the last pass that synchronised has come to it."""
        self.reduced: list[Any] | None = None
        """Stamps of the gradients, as a reduction inside of that pass left them."""
        self.bucketed = replica.gradient_as_bucket_view
        """Whether gradients are tensors of the reducer, which sends the memory that they had at first."""
        self.views: dict[Tensor, Tensor] = {}
        """Those tensors, each with one of the same memory."""
        self.pointers: list[int] = []

    def note_views(self) -> None:
        """Note where gradients are."""
        grads = [p.grad for p in self.trained if p.grad is not None and not p.grad.is_sparse]
        self.views = {grad: grad.detach() for grad in grads}
        self.pointers = [grad.data_ptr() for grad in grads]

    def restore_views(self) -> None:
        """Undo `p.grad.data = values`, which moves the reducer's tensor to other memory; the values stay."""
        for view, memory in self.views.items():
            memory.copy_(view)
            view.data = memory

    def named(self) -> list[tuple[str, Parameter]]:
        """The parameters that the reducer counts, by name."""
        return [*zip(self.names, self.trained, strict=True)]

    def stamps(self) -> list[Any]:
        """Return the version of each gradient."""
        return [grad_version(p) for p in self.trained]


def _is_finished(replica: DistributedDataParallel) -> bool:
    """Whether its reducer waits for no gradient."""
    try:
        check_reduced(replica)
    except RuntimeError:
        return False
    return True
