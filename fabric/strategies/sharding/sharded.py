"""`FSDP2Runtime`: forward, backward and step of models on which `fully_shard` was called."""

from __future__ import annotations

import math
import re
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import NO_GRADIENT, call_of
from fabric.core._torch import is_fsdp
from fabric.core.backward_listeners import add_backward_listener, parameters_of
from fabric.core.compile import uncompiled
from fabric.core.errors import UsageError
from fabric.core.torch_versions import preserve_arguments, require_torch
from fabric.forward import NotifyingForward, differentiable
from fabric.strategies.buffers import SyncedBuffers, broadcast_buffers
from fabric.strategies.error_translation import converted_after_setup
from fabric.strategies.sharding._torch import (
    begin_fsdp,
    fsdp_groups,
    fsdp_states,
    set_frozen_group_dtypes,
)
from fabric.strategies.sharding.blocks import SET_UP
from fabric.strategies.sharding.first_forward import check_first_forward
from fabric.strategies.sharding.forward_check import CallOrder, ForwardCheck
from fabric.strategies.sharding.gathered import FSDPCallGuard, GatheredCall
from fabric.strategies.sharding.mixed_groups import separate_kinds
from fabric.strategies.sharding.reductions import record_reductions
from fabric.strategies.sharding.split import DTensorLayout, is_dtensor
from fabric.utilities.init import name_of, name_of_parameter, names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class FSDP2Runtime(DTensorLayout):
    """Calls unshard the groups that they use, each backward reduces its gradients, and errors reset all
    groups.

    `no_backward_sync` has no effect: unreduced gradients would be full tensors outside of `.grad`, which
    `zero_grad`, clipping and a step do not see. Gradients are reduced in every backward instead. This saves
    memory, and costs a reduction per backward of an accumulation.
    """

    syncs_in_backward = False

    def __init__(self) -> None:
        super().__init__()
        self.order = CallOrder()
        self.passed = 0
        """Checksum of the calls of groups with gradients, backwards and reductions since the last step."""
        self.left_out: dict[int, None] = {}
        """The ids of parameters that had no gradient in a backward that reduced others of their group, since
        the last step, in the order of the backwards.
        """
        self._reached: set[int] = set()
        self._buffers: weakref.WeakKeyDictionary[Module, SyncedBuffers] = weakref.WeakKeyDictionary()

    def join(self, strategy: Any) -> None:
        """Set this rank's device. Subclasses create their mesh here."""
        super().join(strategy)
        add_backward_listener(self)

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Return the module's call; after an error in it the groups are reset."""
        return self._plan(wrapped, wrapped.__call__, method=False)

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """Return the method; the root group is unsharded when a layer of it is called, or first if marked."""
        return self._plan(wrapped, method, method=True, unshard_first=marked)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the user's optimizer with the shards of its parameters.

        Raises:
            UsageError: It has parameters that no model has any more, or that are not sharded; it is LBFGS.
        """
        super().setup_optimizer(optimizer)
        separate_kinds(optimizer)
        self._check_own(optimizer)
        return optimizer

    def reduced_parameters(self) -> set[int]:
        """Return the ids of the parameters of models as setup left them, and of free parameters."""
        return {*self._own(), *(self.free_parameters.alive() if self.free_parameters else ())}

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass; discard partial gradients after an error. Afterwards broadcast rank zero's
        buffers of the models that it reached.

        Raises:
            UsageError: The loss has a term of sharded parameters, or of a tensor that a module computed and
                did not return. `inputs` has a sharded parameter.
        """
        if (inputs := kwargs.get("inputs")) is not None:
            self.after_grad(inputs, [None for _ in inputs])  # torch would leave their p.grad as it is
        gates = self._gates()
        try:
            run(tensors, *args, **kwargs)
            for model, gate in gates:
                if gate.reduce_hidden() and self._buffers[model].synced:
                    self.on_reached(model)
        except BaseException as error:
            for _, gate in gates:
                gate.recover()
            if "storage of size 0" in str(error):
                raise UsageError(
                    "The loss uses a tensor that a forward stored and did not return (an attribute, an entry "
                    "of a list). The parameters for its backward are freed. Return the tensor in a tuple, "
                    "dict or dataclass."
                ) from error
            if type(error) is RuntimeError and re.search(r"and DTensor|Sharding propagation", str(error)):
                raise UsageError(
                    "The loss has a term of sharded parameters (a penalty on weights), which is a DTensor. "
                    "Write p.pow(2).sum().full_tensor() for it, on all ranks. If it multiplies losses (a "
                    "learned weight of a task), return it from the forward: the gradient of full_tensor() is "
                    "that of this rank's loss, and is not averaged."
                ) from error
            raise
        finally:
            reached, self._reached = self._reached, set()
            self.collective_backward = getattr(self.gate, "open", False) or bool(reached)
        models = [self._buffers[model] for model in self.models() if id(model) in reached]
        broadcast_buffers(models, self.channel)

    def on_reached(self, module: Module) -> None:
        """Record that a backward reached an output of `module`."""
        if module.training:
            self._reached.add(id(module))

    def after_nested_pass(self) -> None:
        """Reduce gradients that FSDP2 leaves unreduced in reentrant checkpoints."""
        for _, gate in self._gates():
            gate.reduce_rest()

    def after_grad(self, inputs: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Refuse the gradients of sharded parameters by `torch.autograd.grad`, which are None, and as
        `inputs` of a backward.

        Raises:
            UsageError: The inputs have one.
        """
        without = {id(tensor) for tensor, grad in zip(inputs, grads, strict=True) if grad is None}
        for model, gate in self._gates() if without else ():
            sharded = {id(shard) for shards in gate.shards.values() for _, _, shard in shards}
            for name in [n for n, p in model.named_parameters() if id(p) in sharded & without]:
                raise UsageError(
                    "torch.autograd.grad, or backward(inputs=...), was called for the gradient of "
                    f"{name}, which is a shard: the forward used a gathered copy of it, so it has no "
                    "gradient in this graph. Write fabric.backward(loss), and read p.grad "
                    '(requires_grad_(False) leaves a parameter out); or strategy="ddp" or "zero1".'
                )

    def teardown(self) -> None:
        """Release the process groups; models cannot run after this."""
        for _, gate in self._gates():
            for group in gate.shards:
                group.mesh_info = group.post_forward_mesh_info = None
        super().teardown()

    def install_call_guard(self, module: Any, in_lockstep: bool = False) -> None:
        """Install the call guard of a model once all its groups exist; `module` is the outermost one."""
        begin_fsdp(module)  # makes it the root, also if a submodule is called first
        set_frozen_group_dtypes(module)
        for group in fsdp_groups(fsdp_states(module)):
            preserve_arguments(group, differentiable)
        for name, parameter in module.named_parameters():
            if is_dtensor(parameter):
                _check_strides(name, parameter)
                parameter.register_hook = partial(_refuse_hook, name)
                parameter.share_memory_ = partial(_refuse_sharing, name)  # torch ends the process
        for part in module.modules():
            part.__dict__["_apply"] = partial(_convert, part)
            if is_fsdp(part):  # torch's own error names no remedy
                part.__dict__.update({"__deepcopy__": partial(_refuse_copy, name_of(module)), SET_UP: True})
                part.__dict__["__reduce_ex__"] = partial(_refuse_pickle, name_of(module))
        record_reductions(module, self)
        module.__dict__["_fabric_gate"] = FSDPCallGuard(module, self.checks(module, in_lockstep))
        check_first_forward(module, module.__dict__["_fabric_gate"])

    def checks(self, module: Module, in_lockstep: bool = False) -> ForwardCheck:
        """Return a new check of the calls of a model."""
        return ForwardCheck(module, self, in_lockstep)

    def _plan(
        self, wrapped: Module, call: Callable[..., Any], method: bool, unshard_first: bool = False
    ) -> Callable[..., Any]:
        root = uncompiled(wrapped)
        plan = call if _gate(root) is None else GatheredCall(call, _gate(root), method, unshard_first)
        if root not in self._buffers:
            self._buffers[root] = SyncedBuffers(root)
        return NotifyingForward(plan, self, root) if self._buffers[root].synced else plan

    def _gates(self) -> list[tuple[Any, FSDPCallGuard]]:
        """Return the models that have groups, with their call guards."""
        return [(model, gate) for model in self.models() if (gate := _gate(model)) is not None]

    def _own(self) -> dict[int, str]:
        """Return {id: name} of the parameters whose gradients are reduced, or are excluded by the user."""
        named = [pair for model in self.models() for pair in model.named_parameters()]
        return {id(parameter): name for name, parameter in named if self._is_reduced(parameter)}

    def _check_own(self, optimizer: Any) -> None:
        """Raise if the optimizer trains parameters whose gradients would not be averaged."""
        own = self.reduced_parameters()
        foreign = [p for p in parameters_of(optimizer) if p.requires_grad and id(p) not in own]
        if foreign and own:
            shapes = ", ".join([str(tuple(p.shape)) for p in foreign[:3]])
            raise UsageError(
                f"{type(optimizer).__name__} trains {len(foreign)} parameters (shapes {shapes}) that "
                "fabric.setup has not set up, so their gradients would not be averaged over "
                "ranks. Add layers before fabric.setup, and make the optimizer from model.parameters() after "
                "fabric.setup_module(model)."
            )

    def _is_reduced(self, parameter: Tensor) -> bool:
        """Whether the gradient of a model's parameter is averaged, or is excluded by the user."""
        return True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check before a step that all ranks have gradients of the same parameters. All ranks must call this.

        If ranks used different parameters, or layers in another order, FSDP2 silently mixes up messages.
        """
        super().before_step(optimizer, args, kwargs)
        own, held = self._own(), parameters_of(optimizer)
        if self.channel is None or not any([id(p) in own for p in held]):
            return
        if any([is_dtensor(p) and not is_dtensor(p.grad) for p in held if p.grad is not None]):
            raise UsageError(
                "A gradient is a plain tensor, and its parameter is sharded. Write p.grad = "
                "torch.zeros_like(p).copy_(g), with a g that is the same on all ranks."
            )
        missing = [p for p in held if p.grad is None and p.requires_grad]
        names = [name_of_parameter(p) or own.get(id(p), "a parameter") for p in missing]
        text = f"{NO_GRADIENT} {', '.join(names)}" if names else "all parameters have gradients"
        late = {id(p) for p in held if p.grad is not None} if self.left_out else ()
        if names := [own.get(key, "a parameter") for key in self.left_out if key in late]:
            text += f", earlier backwards had {NO_GRADIENT} {', '.join(names)}"
        if len(args) > 1 or kwargs:
            text = "a closure computes the gradients"
        if self.passed:
            text += f", layers were called in the order {self.passed:08x}"
        self.passed, self.left_out = 0, {}
        owners = names_of_owners(held, self.models())
        self.channel.check_call(call_of(f"{type(optimizer).__name__}.step", f"of {owners}: {text}"))
        if self.after_sync is not None:
            stepped = {*held}
            self.after_sync([m for m in self.models() if not stepped.isdisjoint(m.parameters())])


def _check_strides(name: str, parameter: Any) -> None:
    """Raise for uneven shards of shards in torch before 2.11, whose full_tensor() has a wrong order."""
    from torch.distributed.tensor import Shard

    placements, sizes, shape = parameter.placements, parameter.device_mesh.shape, [*parameter.shape]
    for dim in {one.dim for one in placements if one.is_shard() and type(one) is not Shard}:
        parts = math.prod([size for size, one in zip(sizes, placements, strict=True) if one.is_shard(dim)])
        if shape[dim] % parts:
            require_torch(
                "2.11",
                f"{name} {shape} is sharded by tensor parallel and by FSDP, in {parts} parts of dimension "
                f"{dim} that differ in size. It",
                f"Make its size a multiple of {parts}, or write data_parallel_size=1.",
            )


def _refuse_hook(name: str, hook: Any) -> None:
    """Raise in `register_hook` of a sharded parameter: autograd does not compute its gradient.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{name}.register_hook: {name} is split over ranks, and this hook would never run. Write "
        f"{name}.register_post_accumulate_grad_hook(hook), which gets the parameter with its averaged .grad."
    )


def _refuse_sharing(name: str) -> None:
    """Raise in `share_memory_` of a sharded parameter, which `model.share_memory()` calls.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"share_memory: {name} is split over ranks, and other processes would read a part of it. Write "
        "`with fabric.whole(model) as plain`, and share plain on rank zero, where it is not None."
    )


def _refuse_copy(name: str, memo: Any) -> Any:
    """Raise in `copy.deepcopy` of a module of a sharded model.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{name} was copied after fabric.setup, and is split over ranks: a copy would share its groups. "
        "Write average = copy.deepcopy(model) before setup, and average = fabric.setup_module(average) after "
        "it."
    )


def _refuse_pickle(name: str, protocol: Any) -> Any:
    """Raise if a module of a sharded model is pickled, as `torch.save(model, path)` does.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{name} was pickled after fabric.setup, and is split over ranks: a file would have one rank's part. "
        'Write fabric.save(path, {"model": model}) on all ranks, or `with fabric.whole(model) as plain`, and '
        "pickle plain on rank zero, where it is not None."
    )


def _convert(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Run `_apply` of a sharded model, called by `module.to(...)`, `.half()` and others.

    Raises:
        UsageError: It would change a tensor.
    """
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if (new := fn(tensor)) is not tensor:
                raise converted_after_setup(name, new)
    return module


def _gate(root: Any) -> Any:
    """Return the call guard of a model that FSDP2 shards, or None if it has no groups."""
    return root.__dict__.get("_fabric_gate")
