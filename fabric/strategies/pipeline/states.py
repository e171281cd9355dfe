"""`PipelineStates`: state dicts and norms of a model on several stages, as of one model.

`Tied`: weights that several stages have.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.checkpoint.portable import elsewhere, read_stored
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
    """The ranks of this rank's pipeline, by stage."""
    _ranks: list[int]
    _place: int

    def __init__(self) -> None:
        super().__init__()
        self.names: weakref.WeakKeyDictionary[Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        """Under which keys of a state dict this stage's blocks may stand: one can have several names."""
        self._absent: weakref.WeakKeyDictionary[Module, list[Slot]] = weakref.WeakKeyDictionary()
        self._attended: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor]:
        """Return the gradients and their norm in the whole model; tied ones count on the first stage only."""
        held: list[Any] = [p for p in parameters if p.grad is not None]
        counted = [p.grad for p in held if getattr(p, "_fabric_answers", True)]
        pipeline = self.pipeline
        norm = norm_over_ranks(
            [(counted, [pipeline.collective.group])], norm_type, pipeline.transport.staging_device
        )
        return [p.grad for p in held], norm.to(self.device, held[0].grad.dtype if held else torch.float32)

    clip_value, own_gradients = Layout.clip_value, Layout.own_gradients

    def note_absent(self, module: Module, absent: dict[int, Tensor]) -> None:
        """Note where tensors of other stages stood: by id of the emptied one, what it was like."""
        self._absent[module] = [
            (slots, name, absent[id(tensor)])
            for part in module.modules()
            for slots in (part._parameters, part._buffers)
            for name, tensor in slots.items()
            if id(tensor) in absent
        ]

    @contextmanager
    def complete(self, module: Module) -> Iterator[None]:
        """Context in which the tensors of other stages have their shapes again, on the meta device."""
        held = [(slots, name, slots[name]) for slots, name, _ in self._absent.get(module, ())]
        for slots, name, meta in self._absent.get(module, ()):
            slots[name] = meta.requires_grad_(slots[name].requires_grad)
        try:
            yield
        finally:
            for slots, name, tensor in held:
                slots[name] = tensor

    def module_state(self, module: Module) -> dict[str, Any]:
        """The full state dict, in host memory, in the order of the whole model. All ranks must call this."""
        return self._filled(module, module.state_dict())

    def whole_values(self, module: Module) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, in host memory. All ranks must call this."""
        return self._filled(module, dict([*module.named_parameters(), *module.named_buffers()]))

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load this stage's part of a full state dict; all of it into a model that is not set up.

        Raises:
            RuntimeError: Keys are missing or unexpected (with `strict`), or shapes differ; on all ranks.
        """
        if module not in self._absent:  # a teacher, an average of the weights, a model before its setup
            return super().load_module_state(module, state, strict)
        with self.complete(module):
            away = {k for k, v in module.state_dict().items() if isinstance(v, torch.Tensor) and v.is_meta}
            parts = {
                key: _shape_of(value) if key in away and isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }
            return module.load_state_dict(same_dict_type(state, parts), strict=strict)

    def check_saved(self, state: dict[str, Any]) -> None:
        """Raise if the state has tensors that only later stages have.

        Raises:
            UsageError: There are some; on all ranks.
        """
        here = [path for path, leaf in iter_paths(state) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        first, *others = gather_objects(here, self.pipeline, "save")
        lost = dict.fromkeys([path for other in others for path in other if path not in first])
        if lost:
            more = ", ..." * (len(lost) > 3)
            raise UsageError(
                f"state{', state'.join([*lost][:3])}{more} would be lost: the first stage of the pipeline, "
                "which writes, does not have it. A raw module (model.module) and what is made from its "
                'parameters are of one stage. Write fabric.save(path, {"model": model}) with models that '
                "fabric.setup returned (set an average of the weights up, too), take model.state_dict(), on "
                "all ranks, or fabric.broadcast the value first."
            )

    def attend(self, optimizer: Optimizer) -> None:
        """Let an optimizer's own `state_dict()` raise, which has one stage only. Once; sends nothing."""
        if optimizer not in self._attended and len(self._ranks) > 1:
            self._attended.add(optimizer)
            RejectPartialStateDict(optimizer, "this stage's part")

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check a step; an optimizer that was not set up may hold emptied parameters of other stages."""
        if optimizer in self._attended:
            return
        super().before_step(optimizer, args, kwargs)
        if not all([p.numel() for p in parameters_of(optimizer)]):
            self.attend(optimizer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state, in host memory. All ranks must call this."""
        state: dict[str, Any] = optimizer_view(optimizer).state_dict()
        if len(self._ranks) == 1:
            return state
        here = _numbers_here(optimizer, state)
        own = {n: self._kept(entry) for n, entry in state["state"].items() if n in here}
        merged: dict[Any, Any] = {}
        for part in self._parts(own):
            merged.update(part)
        return {**state, "state": dict(sorted(merged.items()))}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this stage's part of a full state."""
        here = _numbers_here(optimizer, state)
        part = {key: value for key, value in state["state"].items() if key in here}
        optimizer.load_state_dict({**state, "state": map_tree(read_stored, part)})

    def _parts(self, own: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Yield the state of each stage, that of the first stage last."""
        for rank in reversed(self._ranks):
            here = rank == self._ranks[self._place]
            sent = map_tree(elsewhere, own) if self.keeps_parts else own
            part = broadcast_tree(sent if here else None, rank, self.pipeline)
            if self.keeps_parts:
                yield own if here else part
            else:
                yield part if self.keeps_full else map_tree(elsewhere, part)

    def _kept(self, tree: Any) -> Any:
        return tree if self.keeps_parts else map_tree(_on_host, tree)

    def _filled(self, module: Module, values: dict[str, Any]) -> dict[str, Any]:
        """The values with those of other stages in their places."""
        if len(self._ranks) > 1 and module in self._absent:
            own = {
                key: self._kept(value)
                for key, value in values.items()
                if key.startswith(self.names[module]) or (isinstance(value, torch.Tensor) and value.numel())
            }
            for part in self._parts(own):
                values.update(part)
        return values

    def _part(self, value: Any, new: Tensor) -> Any:
        return value


class Tied:
    """A parameter that several stages use: each has a copy, and all get the sum of their gradients.

    Each stage's own contributions are held back, and the sum is added on all of them, so that the copies stay
    the same to the bit.

    Args:
        parameter: This stage's copy.
        channel: Those stages of this pipeline.
        passing: Whether gradients come from the stage's blocks now. Others (of a penalty) are the same on all
            stages, and are not added up.
    """

    def __init__(self, parameter: Parameter, channel: Channel, passing: Callable[[], bool]) -> None:
        self.parameter, self._channel, self._passing = parameter, channel, passing
        self._own: Tensor | None = None
        self._hooked = False

    def arm(self) -> None:
        """Before a forward: from now on, if it is trained. It may have been frozen until here."""
        if self.parameter.requires_grad and not self._hooked:
            self._hooked = True
            self.parameter.register_hook(self._hold_back)

    @torch.no_grad()
    def add_up(self) -> None:
        """The sum over stages into `.grad`. All these stages must call this."""
        own, self._own = self._own, None
        if not self.parameter.requires_grad or not any(on_any_rank([own is not None], self._channel)):
            return
        total = torch.zeros_like(self.parameter) if own is None else own
        total = self._channel.transport.to_staging(total.contiguous())
        self._channel.collective.all_reduce(total, "sum")
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.parameter.grad += total.to(self.parameter.device)

    def forget(self) -> None:
        """Drop what a backward that failed has left."""
        self._own = None

    def _hold_back(self, grad: Tensor) -> Tensor:
        if not self._passing():
            return grad
        grad = grad.to_dense()  # of an embedding it may be sparse, where a linear layer's is not
        self._own = grad.clone() if self._own is None else self._own + grad
        return torch.zeros_like(grad)


def tensors_of(block: Module) -> list[Tensor]:
    """The parameters and buffers of a block, each once."""
    return [*block.parameters(), *[buffer for _, buffer in sorted(block.named_buffers())]]


def emptied(tensor: Tensor) -> Tensor:
    """Take the elements out of a tensor, whoever holds it; gives one on the meta device like it was.

    No size is left that another tensor could be broadcast with: what meets one that has values raises.
    """
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    tensor.grad = None
    tensor.data = tensor.data.new_empty([0] * max(tensor.dim(), 1))
    return Parameter(meta, tensor.requires_grad) if isinstance(tensor, Parameter) else meta


def names_of(module: Module, own: Blocks) -> tuple[str, ...]:
    """Prefixes of the keys of a stage's blocks, under all names that they have in the model."""
    blocks = [block for _, block in own]
    named = module.named_modules(remove_duplicate=False)
    return tuple([f"{name}." for name, part in named if any([part is block for block in blocks])])


def _numbers_here(optimizer: Optimizer, state: dict[str, Any]) -> set[int]:
    """The numbers in an optimizer's state dict of the parameters that this stage holds."""
    held = parameters_of(optimizer)
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    # Of another number of parameters torch says so, when it loads them.
    return {number for number, p in zip(numbers, held, strict=False) if p.numel()}


def _shape_of(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
