"""`Layout`: every parameter on this rank, nothing shared. The base of all layouts, plain torch by itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import foreach_div_
from fabric.core.parts import Part
from fabric.core.traits import Traits
from fabric.core.tree import map_tree
from fabric.utilities.init import EmptyInit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel
    from fabric.core.topology import Topology
    from fabric.strategies.free import FreeParameters
    from fabric.strategies.norms import FiniteNorms


class Layout(Part):
    """Placement of parameters on ranks, and what depends on it: wrapping, gradient sync, clipping, state.

    A layout is the only thing in which strategies differ. It belongs to one strategy and is never copied
    with a model.
    """

    traits = Traits()
    devices: list[torch.device]
    """Those of this machine."""
    channel: Channel | None = None
    """All ranks, for what a layout itself sends; there once this process is in place."""
    keeps_full = True
    """Whether this rank keeps the full values that it gathers, or only takes part."""
    replica_key: tuple[Any, ...] = ()
    """Which part of the model this rank holds: ranks with the same key hold the same tensors."""
    after_sync: Callable[..., None] | None = None
    """`Part.synchronised` of the strategy's parts; None: no part has it."""
    gate: Any = None
    """Open while `fabric.backward` runs."""
    joint = False
    """Whether the last outermost backward was one that all ranks make."""
    free: FreeParameters | None = None
    """Parameters of optimizers that no model has; None: there are none."""
    keeps_parts = False
    """Whether nothing is gathered: states have this rank's parts, and the shapes of what other ranks have."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def resolve(self, plan: Any) -> None:
        """Note this machine's devices, of `plan`, before ranks start. Subclasses check sizes."""
        self.devices = plan.devices

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh that parameters lie on; None where there is none."""
        return None

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module that the forward goes through; `module` itself where nothing is added."""
        return module

    def remap_parameters(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was made before its model was set up the parameters that it has now."""

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that steps. All ranks must call this, after the models of its parameters."""
        return optimizer

    def unwrap(self, wrapped: Module) -> Module:
        """The module that `wrap` was given."""
        return wrapped

    @contextmanager
    def gathering(self, keep: bool, parts: bool = False) -> Iterator[None]:
        """Context in which full states are gathered on all ranks, and kept by those that say so.

        With `parts` nothing is gathered: see `keeps_parts`.

        Raises:
            RuntimeError: The gradients that were clipped last had a norm that is not finite.
        """
        self.finite.look()
        before = self.keeps_full, self.keeps_parts
        self.keeps_full, self.keeps_parts = keep, parts
        try:
            yield
        finally:
            self.keeps_full, self.keeps_parts = before

    def check_saved(self, state: dict[str, Any]) -> None:
        """Raise if rank zero, which writes, lacks something of this state. All ranks must call this."""

    def check_added(self, parameters: list[Tensor]) -> None:
        """Raise if an optimizer cannot take in more parameters after setup."""

    def reduced(self) -> set[int] | None:
        """Ids of the parameters whose gradients are averaged over ranks; None: this layout averages no
        others.
        """
        return None

    def writes(self, optimizer: Optimizer) -> int:
        """Count the in-place changes of an optimizer's parameters between its last step and the current one.

        0: none, or this layout sends no parameters after a step, which would hide a difference.
        """
        return 0

    def owned_before_step(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """By rank, the parameters that it owns as they were before the step in progress, of ranks for which
        `writes` is not 0.
        """
        return []

    def add_free(self, parameters: list[Tensor]) -> None:
        """Average, from now on, gradients of parameters that an optimizer has and no model. They get rank
        zero's values. All ranks must call this.
        """
        reduced = self.reduced()
        free = {p: None for p in parameters if reduced is not None and id(p) not in reduced}
        if free and self.channel is not None and self.channel.world_size > 1:
            from fabric.strategies.free import FreeParameters

            self.free = self.free or FreeParameters(self.channel)
            self.free.add(free)

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Return the function that a forward of the wrapped module calls."""
        return wrapped.__call__

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """Return the function that a call of another method runs, so that its gradients are synchronised too.

        `marked`: by `mark_forward_method`, so that it surely computes.
        """
        return method

    def model_method(self, wrapped: Module, name: str) -> Callable[..., Any] | None:
        """A method that set-up models have beside their own; None: no such thing."""
        return None

    def no_sync(self, wrapped: Module) -> AbstractContextManager[Any]:
        """Context in which backward passes keep their gradients local."""
        return nullcontext()

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass (`run(tensor, *args, **kwargs)`) with what the layout needs before and after
        it.
        """
        run(tensor, *args, **kwargs)

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; gives the norm before, of the whole
        model.

        Raises:
            RuntimeError: With `error_if_nonfinite`: it is not finite, or that of the call before (see
                `FiniteNorms`).
        """
        from fabric.strategies.norms import scale_

        grads, norm = self.total_norm(list(parameters), norm_type)
        if error_if_nonfinite:
            self.finite.check(norm, norm_type)
        with torch.no_grad():
            scale_(grads, norm, max_norm)
        return norm

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor]:
        """The gradients, and their norm in the whole model. All ranks must call this."""
        grads = self.own_gradients(parameters)
        return grads, torch.nn.utils.get_total_norm(grads, norm_type)

    def own_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, each once; of split ones this rank's parts, which are whole sums."""
        return [*{id(p.grad): p.grad for p in parameters if p.grad is not None}.values()]

    @cached_property
    def finite(self) -> FiniteNorms:
        """The check of the norms of gradients."""
        from fabric.strategies.norms import FiniteNorms

        return FiniteNorms()

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        held = [p for p in parameters if p.grad is not None]
        if held:  # torch takes no empty list
            torch.nn.utils.clip_grad_value_(held, clip_value)

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise if gradients of `parameters` wait beside `.grad` for a backward that synchronises them."""

    @torch.no_grad()
    def divide_gradients(self, parameters: Iterable[Tensor], divisor: float) -> None:
        """Divide every gradient by `divisor`, in place."""
        from fabric.strategies.norms import group_by_dtype_device

        for group in group_by_dtype_device(self.own_gradients(parameters)).values():
            foreach_div_(group, divisor)

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Context around the construction of modules; `empty_init` leaves weights without values."""
        return EmptyInit() if empty_init else nullcontext()

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """The user's module as it would be on one rank, for ranks that `keep` it. All ranks must call this.

        The very module, if nothing was changed in it; else a copy on `device`.
        """
        from fabric.strategies.plain import is_plain, plain_copy

        if is_plain(module):
            return module if keep else None
        with self.gathering(keep):
            values = self.whole_values(module)
        return plain_copy(module, values, device) if keep else None

    def whole_values(self, module: Module) -> dict[str, Tensor]:
        """Tensors of the user's module that are not whole on each rank, by name. All ranks must call this."""
        return {}

    def module_state(self, module: Module) -> dict[str, Any]:
        """The full state dict of the user's module."""
        return module.state_dict()

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict into the user's module."""
        return module.load_state_dict(state, strict=strict)

    def optimizer_method(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that a method runs which only the optimizer's own class has."""
        return method

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state into an optimizer."""
        from fabric.checkpoint.portable import read_stored

        optimizer.load_state_dict(map_tree(read_stored, state))

    def teardown(self) -> None:
        """Release what the layout holds."""
