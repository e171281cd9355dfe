"""What a rank keeps of other stages' blocks: names and shapes, and errors for those who call or read them."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.nn import Parameter

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.strategies.layouts.pipeline.shapes import (
    READERS,
    Valueless,
    as_valueless,
    changes_first,
    compute,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module


_SHAPES = frozenset(
    {
        "view_as",
        "reshape_as",
        "expand_as",
        "is_same_size",
        "result_type",
        "_has_compatible_shallow_copy_type",
    }
)
"""Operations of two tensors, one of which gives its shape or dtype."""

_ASSIGNING = frozenset(
    [f"__i{verb}__" for verb in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")]
)

_GRAD: Any = torch.Tensor.grad


class Home(NamedTuple):
    """Which tensor a ghost stands for, and where that one is."""

    name: str
    model: str
    stages: tuple[int, ...]
    here: int

    def where(self) -> str:
        """The tensor's name and place, and this rank's stage."""
        on = "stage" if len(self.stages) == 1 else "stages"
        return (
            f"{self.name} of {self.model}, which is on {on} {' and '.join(map(str, self.stages))} of the "
            f"pipeline; this is stage {self.here}"
        )

    def refusal(self, what: str) -> UsageError:
        """The error where values are wanted."""
        return UsageError(
            f"{what} needs the values of {self.where()}, where it has a shape only. For an average of "
            "weights (EMA) set the copy up, too (copy.deepcopy(model) before setup, then ema = "
            "fabric.setup(ema), with the same balance): it is split alike, and a loop over the parameters "
            "of both averages each on its stage. All values: model.state_dict(), on all ranks. What is here "
            "only: leave out parameters where p.is_meta."
        )


class Ghost(Valueless):
    """A parameter or buffer of another stage, or what was computed from one: a shape, and no values.

    Torch leaves tensors with values as they are, without a word, where one on the meta device is added to
    them. Here this raises, as does whatever asks for values.
    """

    home: Home

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation on ghosts: on shapes only."""
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                found = func(*args)
                return as_valueless(found, args[0]._made) if isinstance(found, torch.Tensor) else found
            if name.startswith("_foreach_"):
                return _by_position(func, name, args, kwargs or {})
            return _compute(func, name, args, kwargs or {})

    @property
    def grad(self) -> Any:
        """As of any tensor; optimizers read it in every step, which costs less this way."""
        with torch._C.DisableTorchFunctionSubclass():
            found = _GRAD.__get__(self)
        return found if found is None or isinstance(found, Ghost) else self._made(found)

    @grad.setter
    def grad(self, value: Any) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        if id(self) not in memo:
            memo[id(self)] = ghost(self, self.home, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def cannot_be_saved(self, name: str) -> UsageError:
        """The error where the raw module's state dict, or a part of it, is saved."""
        return UsageError(
            f"{name} is {self.home.where()}. A raw module (model.module) has the values of this rank's stage "
            'only. Write fabric.save(path, {"model": model}) with the model that fabric.setup returned, or '
            "take its model.state_dict(), on all ranks."
        )

    def _made(self, plain: torch.Tensor) -> torch.Tensor:
        """Something computed from this one."""
        made = plain.as_subclass(Ghost)
        made.home = self.home
        return made


def ghost(tensor: torch.Tensor, home: Home, requires_grad: bool) -> Ghost:
    """A tensor without memory in the place of `tensor`: a parameter if it is one."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.empty_like(tensor, device="meta", requires_grad=False)
        made: Any = torch.Tensor._make_subclass(Ghost, plain, requires_grad)
    made.home = home
    if isinstance(tensor, Parameter):
        made._is_param = True  # how torch marks parameters of other classes
    return made  # type: ignore[no-any-return]


def _compute(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    first = next((tensor for tensor in tensors if isinstance(tensor, Ghost)), None)
    if first is None:  # inside of something else
        return func(*args, **kwargs)
    if name in READERS or (name == "__format__" and args[1]):
        raise first.home.refusal(name)
    if name not in _SHAPES and any([_has_values(tensor) for tensor in tensors]):
        if tensors[0] is first and (changes_first(name) or name in _ASSIGNING):
            return first  # the stage that has it changes it
        what = "Setting an attribute to" if name == "__set__" else f"{name} with"
        raise first.home.refusal(f"{what} a tensor that has values")
    return compute(func, args, kwargs, first._made, lambda: first.home.refusal(name))


def _by_position(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """An operation on lists: what has values by itself, since kernels want one kind of tensor."""
    given = [*args, *kwargs.values()]
    lists = [arg for arg in given if isinstance(arg, list | tuple)]
    count = len(lists[0]) if lists else 0
    lists = [one for one in lists if len(one) == count]
    ghosts = [i for i in range(count) if any([isinstance(one[i], Ghost) for one in lists])]
    if not ghosts or any([isinstance(arg, Ghost) for arg in given]):
        return _compute(func, name, args, kwargs)

    def part(numbers: list[int]) -> tuple[list[Any], dict[str, Any]]:
        chosen = [[arg[i] for i in numbers] if any([arg is o for o in lists]) else arg for arg in given]
        return chosen[: len(args)], dict(zip(kwargs, chosen[len(args) :], strict=True))

    done = {i: _compute(func, name, *part([i])) for i in ghosts}  # first: an error must change nothing
    joined = {i: one[0] if isinstance(one, list | tuple) else one for i, one in done.items()}
    real = [i for i in range(count) if i not in done]
    if real:
        plain, named = part(real)
        joined.update(zip(real, func(*plain, **named) or [None] * len(real), strict=True))
    return tuple([joined[i] for i in range(count)])


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether it has values, here or (a placeholder) on another rank."""
    return not isinstance(tensor, Ghost) and (not tensor.is_meta or isinstance(tensor, Valueless))


class Slots:
    """Where the tensors of a model's blocks are, by block; told apart by what was there at first.

    Tensors on the meta device are replaced when they get values, so only what was there at first says which
    ones are the same.

    Args:
        module: The model.
        blocks: All blocks.
        stage_of: The stage of each.
        here: The stage of this rank.
    """

    def __init__(self, module: Module, blocks: list[Module], stage_of: list[int], here: int) -> None:
        self._blocks = [list(_slots(block)) for block in blocks]
        stages: dict[int, set[int]] = {}
        for block, stage in zip(self._blocks, stage_of, strict=True):
            for _, _, key in block:
                stages.setdefault(key, set()).add(stage)
        self._kept = {key for key, on in stages.items() if here in on}
        self._homes = {
            id(tensor): Home(name, type(module).__name__, tuple(sorted(stages[id(tensor)])), here)
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
            if id(tensor) in stages
        }
        uses = Counter([key for slots in self._blocks for key in {key for _, _, key in slots}])
        self._shared = {key for key, count in uses.items() if count > 1}
        self._ghosts: dict[int, Any] = {}

    def shared(self, number: int) -> list[Any]:
        """The tensors of a block that another one has, too."""
        return [slots[name] for slots, name, key in self._blocks[number] if key in self._shared]

    def leave(self, number: int, shared: bool = False) -> None:
        """Put tensors without memory in the place of a block's that this stage does not hold.

        Args:
            number: Of the block.
            shared: Those that another block has, too; else the others.
        """
        for slots, name, key in self._blocks[number]:
            if key in self._kept or (key in self._shared) != shared:
                continue
            tensor = slots[name]
            if key not in self._ghosts:
                self._ghosts[key] = ghost(tensor, self._homes[key], tensor.requires_grad)
            slots[name] = self._ghosts[key]


def _slots(block: Module) -> Iterator[tuple[dict[str, Any], str, int]]:
    for module in block.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield slots, name, id(tensor)


class _Refusal:
    """A forward pre-hook that raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, module: Module, args: Any) -> NoReturn:
        raise UsageError(self.text)


def refuse_calls(block: Module, name: str, stage: int, rank: int, here: int) -> None:
    """Let a call of the block raise: it is not on this stage."""
    block.register_forward_pre_hook(
        _Refusal(
            f"{name} is on stage {stage} (rank {rank}) of the pipeline, and this is stage {here}: it has no "
            "values here. Call the model itself, model(x), on all ranks."
        ),
        prepend=True,
    )
