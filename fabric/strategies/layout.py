"""`Layout`: all parameters on this rank, no communication. The base class of all layouts."""

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
    """Placement of parameters on ranks, and the operations that depend on it: wrapping of modules, gradient
    synchronisation, clipping, state dicts.

    Strategies differ only in their layout. A layout belongs to one strategy. Copies of a model share it.
    """

    traits = Traits()
    devices: list[torch.device]
    """The devices of this machine."""
    channel: Channel | None = None
    """Channel of all ranks for messages of the layout; None before `setup_environment`."""
    keeps_full = True
    """Whether this rank keeps the full values that it gathers, or drops them."""
    replica_key: tuple[Any, ...] = ()
    """Ranks with the same key hold the same tensors of the model."""
    after_sync: Callable[..., None] | None = None
    """`Part.synchronised` of the strategy's parts; None: no part overrides it."""
    syncs_in_backward = True
    """Whether `after_sync` is called in backwards. Before a step a forward may have changed buffers again."""
    gate: Any = None
    """The strategy's `BackwardGate`, open while `fabric.backward` runs."""
    collective_backward = False
    """Whether all ranks made the last outermost backward."""
    free_parameters: FreeParameters | None = None
    """Parameters of optimizers that belong to no model; None: there are none."""
    keeps_shards = False
    """Whether states hold this rank's shards, and only the shapes of others' tensors: nothing is gathered."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def resolve(self, plan: Any) -> None:
        """Set `devices` from the resolved arguments `plan`, before ranks start. Subclasses validate sizes."""
        self.devices = plan.devices

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parameters, or None."""
        return None

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module whose forward is called; `module` itself if the layout adds no wrapper."""
        return module

    def remap_parameters(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer that was made before setup by those that setup created."""

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer whose `step` is called. All ranks must call this, after their
        models' setup.
        """
        return optimizer

    def unwrap(self, wrapped: Module) -> Module:
        """Return the module that was passed to `wrap`."""
        return wrapped

    @contextmanager
    def gathering(self, keep: bool, parts: bool = False) -> Iterator[None]:
        """Context in which all ranks gather full states; ranks that pass `keep` keep the values.

        With `parts` nothing is gathered: see `keeps_shards`.

        Raises:
            RuntimeError: The norm of the last clipped gradients was not finite.
        """
        self.finite.check_pending()
        before = self.keeps_full, self.keeps_shards
        self.keeps_full, self.keeps_shards = keep, parts
        try:
            yield
        finally:
            self.keeps_full, self.keeps_shards = before

    def check_saved(self, state: dict[str, Any]) -> None:
        """Raise if rank zero, which writes, lacks values of this state. All ranks must call this."""

    def check_added(self, parameters: list[Tensor]) -> None:
        """Raise if parameters cannot be added to an optimizer after setup."""

    def reduced_parameters(self) -> set[int] | None:
        """Return the ids of the parameters whose gradients are averaged over ranks, or None if this layout
        does not restrict them.
        """
        return None

    def writes(self, optimizer: Optimizer) -> int:
        """Count the in-place changes of an optimizer's parameters between its last step and the current one.

        0: none, or this layout does not broadcast parameters after a step, which would hide a difference.
        """
        return 0

    def owned_before_step(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Return for each rank its owned parameters as they were before the running step; only of ranks for
        which `writes` is not 0.
        """
        return []

    def add_free_parameters(self, parameters: list[Tensor], optimizer: Optimizer | None = None) -> None:
        """Register parameters that belong to this optimizer and no model, or that a model has whole:
        broadcast rank zero's values, and average their gradients from now on. All ranks must call this.
        """
        reduced = self.reduced_parameters()
        free = {p: None for p in parameters if reduced is not None and id(p) not in reduced}
        if free:
            from fabric.strategies.free import FreeParameters

            self.free_parameters = self.free_parameters or FreeParameters(self.channel, self)
            self.free_parameters.add(free, optimizer)

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Return the function that a forward of the wrapped module calls."""
        return wrapped.__call__

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """Return the function that a call of another method runs, so that its gradients are synchronised too.

        `marked`: whether the user marked it by `mark_forward_method`.
        """
        return method

    def model_method(self, wrapped: Module, name: str) -> Callable[..., Any] | None:
        """Return a method that the layout adds to models at setup, or None."""
        return None

    def no_sync(self, wrapped: Module) -> AbstractContextManager[Any]:
        """Context in which backward passes keep their gradients local."""
        return nullcontext()

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, `run(tensor, *args, **kwargs)`. Subclasses add work before and after it."""
        run(tensor, *args, **kwargs)

    def reset_reductions(self) -> None:
        """Discard passes that did not end, so that ranks reduce gradients as after setup. All ranks must call
        this, since the order of messages changes.
        """

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the whole model's norm before.

        Raises:
            RuntimeError: With `error_if_nonfinite`: the norm is not finite, or that of the previous call (see
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
        """Return this rank's gradients, and the norm of the whole model's. All ranks must call this."""
        grads = self.local_gradients(parameters)
        return grads, torch.nn.utils.get_total_norm(grads, norm_type)

    def local_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients, each once: of sharded ones this rank's shards, already reduced."""
        return [*{id(p.grad): p.grad for p in parameters if p.grad is not None}.values()]

    @cached_property
    def finite(self) -> FiniteNorms:
        """The check that norms of gradients are finite."""
        from fabric.strategies.norms import FiniteNorms

        return FiniteNorms()

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        with_grad = [p for p in parameters if p.grad is not None]
        if with_grad:  # torch raises for an empty list
            torch.nn.utils.clip_grad_value_(with_grad, clip_value)

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise if `parameters` have gradients that no backward has synchronised yet."""

    @torch.no_grad()
    def divide_gradients(self, parameters: Iterable[Tensor], divisor: float) -> None:
        """Divide every gradient by `divisor`, in place."""
        from fabric.strategies.norms import group_by_dtype_device

        for group in group_by_dtype_device(self.local_gradients(parameters)).values():
            foreach_div_(group, divisor)

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Context for constructing modules; `empty_init` leaves weights uninitialised."""
        return EmptyInit() if empty_init else nullcontext()

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """Return the user's module as on one rank, or None on ranks without `keep`. All ranks must call this.

        It is the module itself if setup changed nothing in it, else a copy on `device`.
        """
        from fabric.strategies.plain import is_plain, plain_copy

        if is_plain(module):
            return module if keep else None
        with self.gathering(keep):
            values = self.full_tensors(module)
        return plain_copy(module, values, device) if keep else None

    def full_tensors(self, module: Module) -> dict[str, Tensor]:
        """Return the full values of the module's sharded tensors, by name. All ranks must call this."""
        return {}

    def module_state(self, module: Module) -> dict[str, Any]:
        """Return the full state dict of the user's module. All ranks must call this."""
        return module.state_dict()

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict into the user's module."""
        return module.load_state_dict(state, strict=strict)

    def optimizer_method(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that a call of a method of the optimizer's subclass runs."""
        return method

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer. All ranks must call this."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state into an optimizer."""
        from fabric.checkpoint.portable import read_stored

        optimizer.load_state_dict(map_tree(read_stored, state))

    def teardown(self) -> None:
        """Release groups and other resources of the layout."""
