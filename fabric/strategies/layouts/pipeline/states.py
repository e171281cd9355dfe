"""`PipelineStates`: state dicts and norms of a model on several stages, as of one model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import map_tree
from fabric.plugins.collectives.frames import call_of
from fabric.plugins.collectives.objects import broadcast_tree
from fabric.plugins.collectives.ordered import from_ordered, to_ordered
from fabric.plugins.io.portable import kept_elsewhere
from fabric.strategies.layouts.norms import scale_
from fabric.strategies.layouts.pipeline.ghosts import Ghost
from fabric.strategies.layouts.shares import WholeStateOnly, stand_in
from fabric.strategies.layouts.split import Split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.plugins.collectives.channel import Channel
    from fabric.strategies.layouts.pipeline.cut import Blocks


class PipelineStates(Split):
    """What the ranks of one pipeline put together."""

    pipeline: Channel
    """The ranks of this rank's pipeline, by stage."""
    _ranks: list[int]
    _place: int

    def __init__(self) -> None:
        super().__init__()
        self.paths: weakref.WeakKeyDictionary[Module, list[str]] = weakref.WeakKeyDictionary()
        """Of the blocks that this stage has."""
        self.names: weakref.WeakKeyDictionary[Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        """Under which keys of a state dict they may stand: a module can have several names."""
        self.outside: weakref.WeakKeyDictionary[Module, list[str]] = weakref.WeakKeyDictionary()
        """Of the modules that are in no block: the model itself, lists of blocks."""
        self._attended: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """As `Whole`; the norm is that of the whole model, the same on all ranks, which all call this.

        Raises:
            RuntimeError: As `Whole`.
        """
        self.pipeline.meet(call_of("clip_gradients", f"max_norm={max_norm}, norm_type={norm_type}"))
        held = [p for p in parameters if p.grad is not None]
        counted = [p.grad for p in held if getattr(p, "_fabric_answers", True)]  # tied ones once
        power = float(norm_type)
        own = torch.nn.utils.get_total_norm(counted, power)  # type: ignore[arg-type]
        infinite = power == float("inf")
        sent = own.detach().to(self.device, torch.float64 if self.device.type != "mps" else torch.float32)
        sent = self.pipeline.wire.ready(sent if infinite else sent**power)
        if len(self._ranks) > 1:
            if infinite:  # backends lose NaN in a maximum
                keys = to_ordered(sent, largest=True)
                self.pipeline.collective.all_reduce(keys, "max")
                sent = from_ordered(keys, sent.dtype)
            else:
                self.pipeline.collective.all_reduce(sent, "sum")
        total = (sent if infinite else sent ** (1.0 / power)).to(self.device, own.dtype)
        if error_if_nonfinite:
            self.finite.check(total, norm_type)
        scale_([p.grad for p in held], total, max_norm)  # type: ignore[misc]
        return total

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        held = [p for p in parameters if p.grad is not None]
        if held:  # an optimizer may have nothing on this stage, and torch takes no empty list
            torch.nn.utils.clip_grad_value_(held, clip_value)

    def module_state(self, module: Module) -> dict[str, Any]:
        """The full state dict, in host memory, in the order of the whole model. All ranks must call this."""
        state: dict[str, Any] = module.state_dict()
        if len(self._ranks) == 1:
            return state
        own = {key: _on_host(value) for key, value in state.items() if self._answers_for(module, key, value)}
        for part in self._parts(own):
            state.update(part)
        return state

    def whole_values(self, module: Module) -> dict[str, Tensor]:
        """What `module_state` gives. All ranks must call this."""
        return self.module_state(module)

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load this stage's part of a full state dict; all of it into a model that is not set up.

        Raises:
            RuntimeError: Keys are missing or unexpected (with `strict`), or shapes differ; on all ranks.
        """
        if module not in self.paths:  # a teacher, an average of the weights, a model before its setup
            return super().load_module_state(module, state, strict)
        own = module.state_dict()
        missing = [key for key in own if key not in state]
        unexpected = [key for key in state if key not in own]
        wrong = [
            f"size mismatch for {key}: {list(state[key].shape)} in the checkpoint, {list(value.shape)} in "
            "the model"
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and key in state and state[key].shape != value.shape
        ]
        if strict:
            wrong += [f"Missing key(s): {', '.join(missing)}"] * bool(missing)
            wrong += [f"Unexpected key(s): {', '.join(unexpected)}"] * bool(unexpected)
        if wrong:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: {'; '.join(wrong)}"
            )
        for path in self.paths[module]:
            part = {key.removeprefix(f"{path}."): v for key, v in state.items() if key.startswith(f"{path}.")}
            if part:
                module.get_submodule(path).load_state_dict(part, strict=False)
        for key, value in module.named_buffers():
            if key in state and key in own and not value.is_meta:  # those that are in no block, too
                with torch.no_grad():
                    value.copy_(state[key])
        for path in self.outside[module]:
            key = f"{path}._extra_state".removeprefix(".")
            if key in state and key in own:
                module.get_submodule(path).set_extra_state(state[key])
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def attend(self, optimizer: Optimizer) -> None:
        """Let an optimizer's own `state_dict()` raise, which has one stage only. Once; sends nothing."""
        if optimizer not in self._attended and len(self._ranks) > 1:
            self._attended.add(optimizer)
            WholeStateOnly(optimizer, "this stage's part")

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """As `Split`, where nobody has set the optimizer up; it may hold what is on other stages now."""
        if optimizer in self._attended:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        here = [p for p in held if not isinstance(self._now(p), Ghost)]
        self._refuse_moved(here, optimizer)
        if len(here) < len(held):
            self.attend(optimizer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state, in host memory. All ranks must call this."""
        state: dict[str, Any] = stand_in(optimizer).state_dict()
        if len(self._ranks) == 1:
            return state
        here = _numbers_here(optimizer, state)
        own = {n: map_tree(_on_host, entry) for n, entry in state["state"].items() if n in here}
        merged: dict[Any, Any] = {}
        for part in self._parts(own):
            merged.update(part)
        return {**state, "state": dict(sorted(merged.items()))}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this stage's part of a full state."""
        here = _numbers_here(optimizer, state)
        part = {key: value for key, value in state["state"].items() if key in here}
        optimizer.load_state_dict({**state, "state": part})

    def _parts(self, own: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """What each stage has, the first one last."""
        for rank in reversed(self._ranks):
            part = broadcast_tree(own if rank == self._ranks[self._place] else None, rank, self.pipeline)
            yield part if self.keeps_full else map_tree(_absent, part)

    def _part(self, value: Any, new: Tensor) -> Any:
        return value

    def _answers_for(self, module: Module, key: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return not value.is_meta
        return key.startswith(self.names.get(module, ()))


def names_of(module: Module, own: Blocks) -> tuple[str, ...]:
    """Prefixes of the keys of a stage's blocks, under all names that they have in the model."""
    blocks = [block for _, block in own]
    named = module.named_modules(remove_duplicate=False)
    return tuple([f"{name}." for name, part in named if any([part is block for block in blocks])])


def outside_of(module: Module, blocks: Blocks) -> list[str]:
    """Paths of the modules that are in no block."""
    inside = {part for _, block in blocks for part in block.modules()}
    return [path for path, part in module.named_modules() if part not in inside]


def _numbers_here(optimizer: Optimizer, state: dict[str, Any]) -> set[int]:
    """The numbers in an optimizer's state dict of the parameters that this stage holds.

    Raises:
        UsageError: The state is that of another number of parameters.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    if len(held) != len(numbers):
        raise UsageError(
            f"The optimizer has {len(held)} parameters, but the state that is loaded {len(numbers)}. Make "
            "it from the same model."
        )
    return {number for number, p in zip(numbers, held, strict=True) if not p.is_meta}


def _absent(value: Any) -> Any:
    return kept_elsewhere(value) if isinstance(value, torch.Tensor) else value


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
