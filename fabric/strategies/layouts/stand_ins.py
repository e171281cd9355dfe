"""Made-up parameters in the place of those that FSDP2 has split: a module runs with them, and sends nothing.

For forwards that only some of the ranks make, where it matters what a module does, not with which numbers.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.torch_internals import fsdp_groups, fsdp_state, is_fsdp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module


def groups_inside(module: Module) -> list[Any]:
    """torch's states of the groups that FSDP2 made of modules inside of a module, each once."""
    found = dict.fromkeys([fsdp_state(inner) for inner in module.modules() if is_fsdp(inner)])
    return [state for state in found if not any([held is module for held in state._modules])]


@contextmanager
def stand_ins(states: list[Any]) -> Iterator[None]:
    """Context in which modules of these groups have made-up parameters while they are called.

    They are the same on all ranks, and of one group at a time. torch takes such calls for ones of a backward
    whose parameters are there: it gathers nothing, frees nothing, and keeps no record of their order.
    """
    groups = fsdp_groups(states)
    before = [
        (holder, name, getattr(holder, name))
        for holder, name in [
            *[(state, "_training_state") for state in states],
            *[(group, "_sharded_state") for group in groups],
        ]
    ]
    made, handles, first = [], [], 0
    for state in states:
        made.append(_MadeUp(state, first))
        first += len(made[-1].parts)
        for module in state._modules:
            handles.append(module.register_forward_pre_hook(made[-1].enter))
            handles.append(module.register_forward_hook(made[-1].leave, always_call=True))
    try:
        for state in states:
            state._training_state = type(state._training_state).PRE_BACKWARD
        for group in groups:
            group._sharded_state = type(group._sharded_state).UNSHARDED
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each in made:
            each.restore()
        for holder, name, value in before:
            setattr(holder, name, value)


class _MadeUp:
    """The parameters of one group, while one of its modules runs."""

    def __init__(self, state: Any, first: int) -> None:
        self.parts = [(g.device, part) for g in fsdp_groups([state]) for part in g.fsdp_params]
        self._first = first
        self._running = 0
        self._held: list[tuple[Module, str, Any]] = []

    def enter(self, module: Module, args: Any) -> None:
        self._running += 1
        if self._running > 1:
            return
        for number, (device, part) in enumerate(self.parts, self._first):
            info, like = part._module_info, part.sharded_param
            value = _made_up(tuple(like.shape), part.param_dtype or part.orig_dtype, device, number)
            places = [(info.module, info.param_name)]
            places += zip(info.shared_modules, info.shared_param_names, strict=True)
            for holder, name in places:
                self._held.append((holder, name, holder._parameters[name]))
                holder._parameters[name] = torch.nn.Parameter(value, requires_grad=False)

    def leave(self, module: Module, args: Any, output: Any) -> None:
        self._running -= 1
        if self._running <= 0:
            self.restore()

    def restore(self) -> None:
        """Put back what was there."""
        self._running = 0
        for holder, name, value in self._held:
            holder._parameters[name] = value
        self._held.clear()


def _made_up(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Small numbers for a matrix, and numbers near one for what scales or shifts."""
    random = torch.Generator(device).manual_seed(seed)
    made = torch.randn(shape, generator=random, device=device)
    made = made * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.3 * made.tanh()
    return made.to(dtype)
