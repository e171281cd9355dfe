"""`DTensorLayout`: the base class of layouts whose parameters are DTensors.

Full state dicts, norms, optimizers created before setup, and modules on the meta device.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.portable import read_stored
from fabric.collectives.frames import call_of
from fabric.core._torch import tensor_of
from fabric.core.backward_listeners import add_step_listener, parameters_of
from fabric.core.errors import UsageError
from fabric.core.traits import Traits
from fabric.core.tree import map_tree
from fabric.strategies.deferred_init.deferred import DeferredInit, DeferredTensor
from fabric.strategies.layout import Layout
from fabric.strategies.sharding.copies import StateCopies
from fabric.strategies.sharding.replaced import mark_replaced
from fabric.utilities.init import has_meta_parameters, names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.precision import DtypePolicy


SPLIT = Traits(splits_parameters=True, splits_optimizers=True, initialises_meta=True)
"""Traits of all layouts whose parameters are DTensors."""


class DTensorLayout(Layout):
    """Setup replaces parameters by their shards; optimizers, state dicts and norms are adapted."""

    traits = SPLIT

    def __init__(self) -> None:
        self.mesh: DeviceMesh | None = None
        self.device = torch.device("cpu")
        self.policy: DtypePolicy | None = None
        self._replaced: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
        self._models: list[weakref.ref[Module]] = []
        self.copies = StateCopies()
        self._remove_step_listener: Callable[[], None] | None = None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parameters; None before launch."""
        return self.mesh

    def join(self, strategy: Any) -> None:
        """Set this rank's device. Subclasses create their mesh here."""
        from fabric.strategies.sharding.dtensors import patch_dtensor

        super().join(strategy)
        self.device, self.policy = strategy.topology.device, strategy.precision.policy
        patch_dtensor(self)
        self._remove_step_listener = self._remove_step_listener or add_step_listener(self)

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Context for constructing modules; with `empty_init` setup initialises parameters, shard
        by shard.
        """
        return DeferredInit(self.device) if empty_init else nullcontext()

    @contextmanager
    def recording_replacements(self, module: Module) -> Iterator[None]:
        """Context that records which new parameter replaces which old one, for `remap_parameters`."""
        # Weak references: full parameters are freed once they are sharded, unless an optimizer holds them.
        before = [
            (m, name, f"{path}.{name}" if path else name, id(p), weakref.ref(p))
            for path, m in module.named_modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        yield
        for owner, name, path, key, old in before:
            new, kept = owner._parameters[name], tensor_of(old)
            if new is not None and kept is not None and new is not kept:
                self._replaced[key] = (old, weakref.ref(new))
                mark_replaced(kept, path)
        self._models.append(weakref.ref(module))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the user's optimizer with the shards of its parameters.

        Raises:
            UsageError: It is LBFGS.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS joins all parameters in one vector, which sharded parameters cannot be part of. Use "
                'another optimizer, or strategy="ddp".'
            )
        self.remap_parameters(optimizer)
        return optimizer

    def remap_parameters(self, optimizer: Optimizer) -> None:
        """Replace full parameters by their shards, in the optimizer's groups and state."""
        for group in optimizer.param_groups:
            for i, old in enumerate(group["params"]):
                new = self._current_parameter(old)
                if new is old:
                    continue
                group["params"][i] = new
                state = optimizer.state.pop(old, None)
                if state is not None and not new.is_meta:
                    optimizer.state[new] = {
                        key: self._shard_state(_materialise_state(value, new), new)
                        for key, value in state.items()
                    }
            # foreach is torch's default on accelerators, and fails for tensors of different meshes.
            is_set = group.get("foreach", 0) is not None or group.get("fused")
            if self.device.type != "cpu" and not is_set:
                kinds = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
                group["foreach"] = False if len(kinds) > 1 else None

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check the parameters before a step of any optimizer of this process.

        Raises:
            UsageError: It has parameters that setup replaced, and would train nothing; or a state dict of a
                model was written, and not loaded.
        """
        self.copies.check()
        parameters = parameters_of(optimizer) if self._replaced else []
        stale = [tuple(p.shape) for p in parameters if self._current_parameter(p) is not p]
        if stale:
            raise UsageError(
                f"{type(optimizer).__name__} holds {len(stale)} parameters (shapes "
                f"{', '.join(map(str, stale[:3]))}) that setup removed from the model and replaced by "
                "shards, so this step would train nothing. Write model, optimizer = fabric.setup(model, "
                "optimizer), or optimizer = fabric.setup_optimizers(optimizer) after "
                "fabric.setup_module(model)."
            )

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before.

        The norm is that of the whole model, the same on all ranks. All ranks must call this.
        """
        if self.channel is not None:
            owners = names_of_owners(parameters, self.models())
            what = f"of {owners}, max_norm={max_norm}, norm_type={norm_type}"
            self.channel.check_call(call_of("clip_gradients", what))
        return super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor]:
        """Return this rank's shards of the gradients, and the norm of the whole model's."""
        from fabric.strategies.norms import norm_over_ranks
        from fabric.strategies.sharding.dtensors import local_gradients_by_group

        shards = local_gradients_by_group(parameters)
        grads = [grad for local, _ in shards for grad in local]
        if not grads:
            return [], torch.tensor(0.0)
        staging = self.mesh.device_type if self.mesh is not None else self.device
        return grads, norm_over_ranks(shards, norm_type, staging).to(grads[0].device, grads[0].dtype)

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        for grad in self.local_gradients(parameters):
            grad.clamp_(-clip_value, clip_value)

    def local_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return this rank's shards of the gradients, each once."""
        from fabric.strategies.sharding.dtensors import local_gradients_by_group

        return [grad for local, _ in local_gradients_by_group(parameters) for grad in local]

    def full_tensors(self, module: Module) -> dict[str, Tensor]:
        """Return the full tensors of the user's module, on the CPU. All ranks must call this."""
        named = dict([*module.named_parameters(), *module.named_buffers()])
        values: dict[str, Tensor] = self.unshard_tree(named)
        return values

    def unshard_tree(self, tree: Any) -> Any:
        """Return the tree with full tensors in place of DTensors; with `keeps_shards` unchanged."""
        from fabric.strategies.sharding.dtensors import full_tree

        return tree if self.keeps_shards else full_tree(tree, self.keeps_full)

    def module_state(self, module: Module) -> dict[str, Any]:
        """Return the full state dict on the CPU. All ranks must call this."""
        self.copies.check()
        state: dict[str, Any] = module.state_dict()
        state.update(self.unshard_tree(dict(state)))
        self.copies.add(module, state)
        return state

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load this rank's shards of a full state dict; a module on the meta device is assigned the
        tensors.
        """
        self.copies.drop(module)
        if has_meta_parameters(module):
            return _assign(module, state, strict)
        from fabric.strategies.sharding.dtensors import local_shards

        return module.load_state_dict(local_shards(state, module.state_dict()), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state on the CPU. All ranks must call this."""
        state = optimizer.state_dict()
        return {**state, "state": self.unshard_tree(state["state"])}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's shards of a full state."""
        from fabric.strategies.sharding.dtensors import shard_optimizer_state

        placed = shard_optimizer_state(optimizer, state)
        optimizer.load_state_dict(map_tree(read_stored, placed))

    def teardown(self) -> None:
        """Release the mesh."""
        self.mesh = None
        self._replaced.clear()
        if self._remove_step_listener is not None:
            self._remove_step_listener()

    def models(self) -> list[Any]:
        """Return the models that were set up and still exist, in the order of setup."""
        return [model for ref in self._models if (model := ref()) is not None]

    def _shard_state(self, value: Any, new: Tensor) -> Any:
        """Return the shard of a value of an optimizer's state, for a parameter that was sharded."""
        from fabric.strategies.sharding.dtensors import shard_like

        return shard_like(value, new)

    def _current_parameter(self, parameter: Tensor) -> Tensor:
        old, new = self._replaced.get(id(parameter), (None, None))
        now = new() if new is not None and old is not None and old() is parameter else None
        return parameter if now is None else now


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without an import of the class."""
    return hasattr(tensor, "device_mesh")


def _materialise_state(value: Any, new: Tensor) -> Any:
    """Return a state that an optimizer created from a meta parameter (as Adagrad does), with its values."""
    return value.recorder.make(value) if isinstance(value, DeferredTensor) and new.numel() else value


def _assign(module: Module, state: dict[str, Any], strict: bool) -> Any:
    """Assign the tensors of `state` as parameters of a module on the meta device; tied ones stay tied."""
    slots = [(m, name, id(p)) for m in module.modules() for name, p in m._parameters.items() if p is not None]
    copied = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
    }
    result = module.load_state_dict(copied, strict=strict, assign=True)
    first: dict[int, Any] = {}
    for owner, name, key in slots:
        owner._parameters[name] = first.setdefault(key, owner._parameters[name])
    return result
