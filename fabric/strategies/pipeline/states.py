"""`PipelineStates`: state dicts and gradient norms of a whole model whose stages are on several ranks.

`TiedParameter`: a weight that several stages have.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.checkpoint.portable import read_stored, to_placeholder
from fabric.collectives.objects import broadcast_tree, gather_objects
from fabric.core.backward_listeners import parameters_of
from fabric.core.errors import UsageError
from fabric.core.tree import iter_paths, map_tree
from fabric.strategies.layout import Layout
from fabric.strategies.norms import norm_over_ranks
from fabric.strategies.sharding.split import DTensorLayout
from fabric.strategies.tensor_sync import on_any_rank
from fabric.strategies.zero1.shares import RejectPartialStateDict, optimizer_view
from fabric.utilities.state_keys import same_dict_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel
    from fabric.strategies.pipeline.cut import Blocks

    Slot = tuple[dict[str, Any], str, Any]


class PipelineStates(DTensorLayout):
    """State dicts, checkpoints and norms of a model over the ranks of one pipeline."""

    pipeline: Channel
    """The ranks of this rank's pipeline, in the order of stages."""
    _ranks: list[int]
    _stage_index: int

    def __init__(self) -> None:
        super().__init__()
        self.key_prefixes: weakref.WeakKeyDictionary[Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        """Prefixes of the state dict keys of this stage's blocks; a shared block has several."""
        self._emptied: weakref.WeakKeyDictionary[Module, list[Slot]] = weakref.WeakKeyDictionary()
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor]:
        """Return the gradients and the norm of the whole model; tied ones count on their first stage only."""
        with_grad: list[Any] = [p for p in parameters if p.grad is not None]
        counted = [p.grad for p in with_grad if getattr(p, "_fabric_counts_in_norm", True)]
        pipeline = self.pipeline
        norm = norm_over_ranks(
            [(counted, [pipeline.collective.group])], norm_type, pipeline.transport.staging_device
        )
        # Of all stages, so that ranks agree: a frozen stage has no gradients.
        dtype = next((p.dtype for p in parameters if p.requires_grad), torch.float32)
        return [p.grad for p in with_grad], norm.to(self.device, dtype)

    clip_value, local_gradients = Layout.clip_value, Layout.local_gradients

    def record_emptied(self, module: Module, metas: dict[int, Tensor]) -> None:
        """Record the tensors of other stages: {id of the emptied tensor: meta tensor of its shape}."""
        self._emptied[module] = [
            (slots, name, metas[id(tensor)])
            for part in module.modules()
            for slots in (part._parameters, part._buffers)
            for name, tensor in slots.items()
            if id(tensor) in metas
        ]

    @contextmanager
    def on_meta(self, module: Module) -> Iterator[None]:
        """Context in which the tensors of other stages are meta tensors of their full shapes."""
        before = [(slots, name, slots[name]) for slots, name, _ in self._emptied.get(module, ())]
        for slots, name, meta in self._emptied.get(module, ()):
            slots[name] = meta.requires_grad_(slots[name].requires_grad)
        try:
            yield
        finally:
            for slots, name, tensor in before:
                slots[name] = tensor

    def module_state(self, module: Module) -> dict[str, Any]:
        """Return the full state dict on the CPU, in the order of the whole model. All ranks must
        call this.
        """
        return self._merged(module, module.state_dict())

    def full_tensors(self, module: Module) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model, on the CPU. All ranks must call this."""
        return self._merged(module, dict([*module.named_parameters(), *module.named_buffers()]))

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load this stage's entries of a full state dict, or all entries into a model that is not set up.

        Raises:
            RuntimeError: Keys are missing or unexpected (with `strict`), or shapes differ; on all ranks.
        """
        if module not in self._emptied:  # a teacher, an average of the weights, a model before its setup
            return super().load_module_state(module, state, strict)
        with self.on_meta(module):
            metas = {k for k, v in module.state_dict().items() if isinstance(v, torch.Tensor) and v.is_meta}
            local = {
                key: _meta_like(value) if key in metas and isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }
            return module.load_state_dict(same_dict_type(state, local), strict=strict)

    def check_saved(self, state: dict[str, Any]) -> None:
        """Raise if the state has tensors that rank zero, which writes, has emptied. All ranks must call this.

        Raises:
            UsageError: Only later stages have the values of a tensor; on all ranks.
        """
        local = [path for path, leaf in iter_paths(state) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        first, *others = gather_objects(local, self.pipeline, "save")
        lost = dict.fromkeys([path for other in others for path in other if path not in first])
        if lost:
            more = ", ..." * (len(lost) > 3)
            raise UsageError(
                f"state{', state'.join([*lost][:3])}{more} would be lost: the first stage of the pipeline, "
                "which writes, does not have it. A raw module (model.module) and tensors made from its "
                'parameters have the values of one stage. Write fabric.save(path, {"model": model}) with '
                "models that fabric.setup returned (set an average of the weights up, too), save "
                "model.state_dict(), called on all ranks, or fabric.broadcast the value first."
            )

    def reject_own_state_dict(self, optimizer: Optimizer) -> None:
        """Make `optimizer.state_dict()` raise, since it has one stage only. No communication."""
        if optimizer not in self._guarded and len(self._ranks) > 1:
            self._guarded.add(optimizer)
            RejectPartialStateDict(optimizer, "this stage's part")

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check a step. An optimizer that was not set up may hold emptied parameters of other stages."""
        if optimizer in self._guarded:
            return
        super().before_step(optimizer, args, kwargs)
        if not all([p.numel() for p in parameters_of(optimizer)]):
            self.reject_own_state_dict(optimizer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state on the CPU. All ranks must call this."""
        state: dict[str, Any] = optimizer_view(optimizer).state_dict()
        if len(self._ranks) == 1:
            return state
        indices = _local_indices(optimizer, state)
        local = {n: self._to_cpu(entry) for n, entry in state["state"].items() if n in indices}
        merged: dict[Any, Any] = {}
        for entries in self._stage_states(local):
            merged.update(entries)
        return {**state, "state": dict(sorted(merged.items()))}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this stage's entries of a full state."""
        indices = _local_indices(optimizer, state)
        local = {key: value for key, value in state["state"].items() if key in indices}
        optimizer.load_state_dict({**state, "state": map_tree(read_stored, local)})

    def _stage_states(self, local: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Yield the entries of each stage, those of the first stage last. All ranks must call this."""
        for rank in reversed(self._ranks):
            is_src = rank == self._ranks[self._stage_index]
            sent = map_tree(to_placeholder, local) if self.keeps_shards else local
            received = broadcast_tree(sent if is_src else None, rank, self.pipeline)
            if self.keeps_shards:
                yield local if is_src else received
            else:
                yield received if self.keeps_full else map_tree(to_placeholder, received)

    def _to_cpu(self, tree: Any) -> Any:
        return tree if self.keeps_shards else map_tree(_leaf_to_cpu, tree)

    def _merged(self, module: Module, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` with the entries of all stages. All ranks must call this."""
        if len(self._ranks) > 1 and module in self._emptied:
            prefixes = self.key_prefixes[module]
            local = {
                key: self._to_cpu(value)
                for key, value in values.items()
                if key.startswith(prefixes) or (isinstance(value, torch.Tensor) and value.numel())
            }
            for entries in self._stage_states(local):
                values.update(entries)
        return values

    def _shard_state(self, value: Any, new: Tensor) -> Any:
        return value


class TiedParameter:
    """A parameter that several stages use: each has a copy, and all copies get the sum of the gradients.

    A hook takes each stage's contribution out of `.grad`. Then the same sum is added on all these stages, so
    the copies stay bitwise equal.

    Args:
        parameter: This stage's copy.
        channel: The ranks of this pipeline whose stages use it.
        in_stage_backward: Whether the running backward is one of the stage's blocks. Other gradients (of a
            penalty on weights) are the same on all stages, and are not summed.
    """

    def __init__(self, parameter: Parameter, channel: Channel, in_stage_backward: Callable[[], bool]) -> None:
        self.parameter, self._channel, self._in_stage_backward = parameter, channel, in_stage_backward
        self._local_grad: Tensor | None = None
        self._hooked = False

    def register_hook(self) -> None:
        """Register the hook before a forward, if the parameter requires a gradient now. Once."""
        if self.parameter.requires_grad and not self._hooked:
            self._hooked = True
            self.parameter.register_hook(self._defer_gradient)

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the sum over stages to `.grad`. All ranks of the channel must call this."""
        local, self._local_grad = self._local_grad, None
        if not self.parameter.requires_grad or not any(on_any_rank([local is not None], self._channel)):
            return
        total = torch.zeros_like(self.parameter) if local is None else local
        total = self._channel.transport.to_staging(total.contiguous())
        self._channel.collective.all_reduce(total, "sum")
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.parameter.grad += total.to(self.parameter.device)

    def discard(self) -> None:
        """Discard the local gradient of a backward that failed."""
        self._local_grad = None

    def _defer_gradient(self, grad: Tensor) -> Tensor:
        if not self._in_stage_backward():
            return grad
        grad = grad.to_dense()  # an embedding's may be sparse, and is added to a linear layer's
        self._local_grad = grad.clone() if self._local_grad is None else self._local_grad + grad
        return torch.zeros_like(grad)


def parameters_and_buffers(block: Module) -> list[Tensor]:
    """Return the parameters and buffers of a block, each once."""
    return [*block.parameters(), *[buffer for _, buffer in sorted(block.named_buffers())]]


def empty_(tensor: Tensor) -> Tensor:
    """Remove the elements of a tensor in place, and return a meta tensor of its former shape.

    All dimensions have size 0 afterwards: operations with tensors of other sizes raise, and do not broadcast.
    """
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    tensor.grad = None
    tensor.data = tensor.data.new_empty([0] * max(tensor.dim(), 1))
    return Parameter(meta, tensor.requires_grad) if isinstance(tensor, Parameter) else meta


def key_prefixes(module: Module, local: Blocks) -> tuple[str, ...]:
    """Return the prefixes of the state dict keys of a stage's blocks, of all names of each block."""
    blocks = [block for _, block in local]
    named = module.named_modules(remove_duplicate=False)
    return tuple([f"{name}." for name, child in named if any([child is block for block in blocks])])


def _local_indices(optimizer: Optimizer, state: dict[str, Any]) -> set[int]:
    """Return the indices in an optimizer's state dict of the parameters of this stage."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    # Not strict: if the numbers of parameters differ, `load_state_dict` raises.
    pairs = zip(indices, parameters_of(optimizer), strict=False)
    return {index for index, parameter in pairs if parameter.numel()}


def _meta_like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _leaf_to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
