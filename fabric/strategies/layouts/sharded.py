"""`Sharded`: what models split by FSDP2 need while they run, whoever called `fully_shard` on them."""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.plugins.collectives.frames import call_of
from fabric.strategies.layouts.evaluation import Evaluation
from fabric.strategies.layouts.gathered import GatheredCall, RootGate, own_output
from fabric.strategies.layouts.hooked import HookedCall
from fabric.strategies.layouts.split import Split
from fabric.utilities.compile import is_compiled
from fabric.utilities.nested_backward import attend_nested_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class Sharded(Split):
    """Calls gather what they need, gradients are synchronised or refused, failures leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._local: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # roots that ran under no_sync since the last step

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """The module's call; a failure in it leaves the groups usable."""
        return self._plan(wrapped, wrapped.__call__, method=False)

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """The method; the root group is gathered when a layer of it is called, or at once if marked."""
        return self._plan(wrapped, method, method=True, opens=marked)

    @contextmanager
    def no_sync(self, wrapped: Module) -> Iterator[None]:
        """Gradients of backwards inside stay whole on each rank: 4 bytes a parameter more."""
        root = _root(wrapped)
        if _gate(root) is None:
            yield
            return
        self._local.add(root)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The user's own optimizer, with the parts of its parameters; it refuses gradients that are local.

        Raises:
            UsageError: It holds parameters that no model has any more, or that are not split; it is LBFGS.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS joins all parameters in one vector, which parameters that are split over ranks "
                'cannot be. Use another optimizer, or strategy="ddp".'
            )
        self.follow(optimizer)
        self._check_current(optimizer)
        if not getattr(optimizer, "_fabric_checked", False):
            optimizer.register_step_pre_hook(self._check_step)
            optimizer._fabric_checked = True  # type: ignore[attr-defined]
        return optimizer

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass; one that fails leaves no half-made gradients behind."""
        try:
            run(tensor, *args, **kwargs)
        except BaseException:
            for model in self.models():
                if _gate(model) is not None:
                    _gate(model).recover()
            raise

    def after_nested_pass(self) -> None:
        """Reentrant checkpoints: what FSDP2 leaves unreduced there."""
        for model in self.models():
            if _gate(model) is not None:
                _gate(model).reduce_rest()

    def forget_gradients(self, parameters: list[Tensor]) -> None:
        """Drop what backwards under no_sync left: it is whole, and not in `.grad`."""
        for part in self._with_local(parameters):
            part.unsharded_accumulated_grad = None
            if hasattr(part, "_unsharded_param"):
                part._unsharded_param.grad = None
        self._local.clear()

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise if backwards under no_sync left gradients of `parameters` that are whole, and this rank's."""
        if self._local and list(self._with_local(parameters)):
            raise UsageError(
                f"{doing} came while gradients of backwards under no_backward_sync() were never "
                "synchronised: the ranks would step apart. Let the last backward of each step run outside of "
                "it, or call zero_grad() to drop them."
            )

    def teardown(self) -> None:
        """Let go of the groups; models cannot run after this."""
        for model in self.models():
            for state in _states(model) if _gate(model) else ():
                for group in state._fsdp_param_groups:
                    group.mesh_info = group.post_forward_mesh_info = None
        super().teardown()

    def turned(self, wrapped: Module) -> None:
        """The model goes from training to evaluation or back: the next training forward meets all ranks."""
        gate = _gate(_root(wrapped))
        if gate is not None and gate.evaluation is not None:
            gate.evaluation.turned = True

    def open_gate(self, module: Any) -> None:
        """Call this when all groups of a model stand, and `module` is the outermost."""
        module._get_fsdp_state()._lazy_init()  # the root is this one, whatever is called first
        channel, evaluation = self.channel, None
        if channel is not None and channel.world_size > 1:
            evaluation = Evaluation(module, next(self._numbers), channel)
        module.__dict__["_fabric_gate"] = RootGate(module, evaluation)
        attend_nested_passes(self)
        for state in _states(module):
            for group in state._modules:
                group.register_forward_hook(own_output, prepend=True)

    def _plan(
        self, wrapped: Module, call: Callable[..., Any], method: bool, opens: bool = False
    ) -> Callable[..., Any]:
        root = _root(wrapped)
        plan = call if _gate(root) is None else GatheredCall(call, _gate(root), method, opens)
        return HookedCall(plan, self, root, arms=False) if self.buffered(root) else plan

    def _check_current(self, optimizer: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        current = {id(p) for model in self.models() for p in model.parameters()}
        self._check_split(optimizer)
        stale = [tuple(p.shape) for p in held if id(p) not in current]
        if stale and current:
            raise UsageError(
                f"{type(optimizer).__name__} holds {len(stale)} parameters (shapes "
                f"{', '.join(map(str, stale[:3]))}) that setup took out of the model. Make it from "
                "model.parameters() after fabric.setup_module(model), then "
                "fabric.setup_optimizers(optimizer)."
            )

    def _check_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A hook before each step: gradients are synchronised, and all ranks have those of the same
        parameters.

        FSDP2 reduces what it finds. Where ranks used different parameters it mixes them up without an error.
        """
        self.check_synced(_parameters(optimizer), f"{type(optimizer).__name__}.step()")
        self._local.clear()
        self._check_split(optimizer)
        guard = None if self.channel is None else self.channel.collective.guard
        if guard is None or not guard.whole or len(args) > 1 or kwargs:
            return  # a closure makes gradients in the step
        bare = [p for p in _parameters(optimizer) if p.grad is None and p.requires_grad]
        guard.meet(call_of(f"{type(optimizer).__name__}.step", self._names(bare)))

    def _check_split(self, optimizer: Any) -> None:
        """Raise if the optimizer trains parameters whose gradients would stay this rank's."""

    def _names(self, bare: list[Tensor]) -> str:
        if not bare:
            return "all parameters have gradients"
        known = {id(p): name for model in self.models() for name, p in model.named_parameters()}
        return "no gradient for " + ", ".join([known.get(id(p), "a parameter") for p in bare])

    def _with_local(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        """FSDP2's own records of those of `parameters` that hold an unsynchronised gradient."""
        wanted = {id(p) for p in parameters}
        for root in list(self._local):
            for state in _states(root):
                for group in state._fsdp_param_groups:
                    for part in group.fsdp_params:
                        grad = getattr(getattr(part, "_unsharded_param", None), "grad", None)
                        local = part.unsharded_accumulated_grad is not None or grad is not None
                        if local and id(part.sharded_param) in wanted:
                            yield part


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gate(root: Any) -> Any:
    """The gate of a model that FSDP2 splits; None: it has no groups."""
    return root.__dict__.get("_fabric_gate")


def _root(wrapped: Module) -> Any:
    while is_compiled(wrapped):
        wrapped = wrapped._orig_mod  # type: ignore[assignment]
    return wrapped


def _states(root: Any) -> list[Any]:
    states: list[Any] = root._get_fsdp_state()._state_ctx.all_states
    return states
