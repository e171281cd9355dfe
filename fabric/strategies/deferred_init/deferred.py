"""`DeferredInit`: modules are built without memory for their weights, whose values are made later.

Used by layouts that shard. `torch.empty` gives tensors on the meta device (`DeferredTensor`). Operations on
them are recorded with the state of the random generator, and replayed by `make`: those of constructors, and
of any initialisation before the model is set up. Everything else is made as always.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fabric.core._torch import memory_of
from fabric.core.errors import UsageError
from fabric.core.tree import flatten, map_tree
from fabric.strategies._torch import value_of
from fabric.strategies.deferred_init._torch import PARAMETER_MARK, no_subclass_dispatch, written_by
from fabric.utilities.random_stream import default_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class _View:
    """Size, stride, offset and dtype of a tensor, to view it in other memory.

    No dataclass, so that it is a leaf of trees.
    """

    __slots__ = ("dtype", "memory", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.memory, self.dtype = memory_of(tensor), tensor.dtype
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def of(self, storage: Any) -> Tensor:
        """The tensor, in this piece of memory."""
        bare = torch.empty(0, dtype=self.dtype, device=storage.device)
        return bare.set_(storage, self.offset, self.size, self.stride)

    def scratch(self, device: torch.device) -> Tensor:
        """Memory of its own for a tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Step:
    """One thing that was done: `function(*args, **kwargs)`, drawn from `state`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[int | None]
    """The pieces of memory that its outputs are, and did not exist before."""
    read: set[int]
    """Those that it sees."""
    gives: bool = False
    """Whether it gives values to what had none."""
    state: Tensor | None = None
    refusal: UsageError | None = None
    """Why it cannot be repeated."""


class DeferredTensor(torch.Tensor):
    """A tensor without memory of which all that is done with it is recorded."""

    recorder: DeferredInit

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation on such tensors; torch asks them nothing more while this runs."""
        found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, DeferredTensor)]
        with no_subclass_dispatch():
            return found[0].recorder.run(func, args, kwargs or {})

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True. Some functions of torch.nn.init ask, and do nothing then: they are recorded as a whole."""
        self.recorder.asked(self, sys._getframe(1))
        return True

    @property
    def data(self) -> Tensor:
        """The `data` of the tensor; setting it copies the values."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.device.type == "meta":
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif self.shape != value.shape or self.dtype != value.dtype:
            raise _refusal("weight.data = other", self)
        else:
            self.detach().copy_(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would put a number on the meta device first, where it is lost.
        super().__setitem__(index, torch.as_tensor(value, dtype=self.dtype))

    def plain(self) -> Tensor:
        """The same memory that is not there, unrecorded."""
        return _View(self).of(self.untyped_storage())

    def users_attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on the tensor."""
        return {key: value for key, value in vars(self).items() if key not in ("recorder", PARAMETER_MARK)}


class DeferredInit(TorchFunctionMode):
    """Context in which modules are built without memory for what `torch.empty` makes: nearly all parameters.

    The random generators move on as in a plain construction: each initialisation is drawn once on a scratch
    tensor, so that peak memory is one parameter. `make` gives a tensor the values of that construction.

    Args:
        device: Where the values will be drawn.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self._generator = device, default_generator(device)
        self._steps: list[_Step] = []
        self._writers: dict[int, list[int]] = {}
        """Which steps wrote to each piece of memory, by its number."""
        self._kept: list[Any] = []
        """So that no other piece of memory gets the number of one of these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredInit:
        return self

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was given values, which `make` can repeat."""
        return any([step.gives for step in self._history(memory_of(tensor))])

    @torch.no_grad()
    def make(self, tensor: Tensor, replay: bool = True) -> Tensor:
        """Memory on the device for `tensor`, and with `replay` the values that it was given.

        Raises:
            UsageError: They were computed in a way that cannot be repeated.
        """
        view, real = _View(tensor), dict[int, Any]()
        if not replay:
            return view.scratch(self.device)
        before = self._generator.get_state()
        try:
            for step in self._history(view.memory):
                self._repeat(step, real)
        finally:
            self._generator.set_state(before)
        part, storage = view.of(real[view.memory]), real[view.memory]
        return part if part.nbytes == storage.nbytes() else part.clone()

    def adopt(self, tensor: Tensor) -> Any:
        """A tensor on the meta device as one that is recorded from now on."""
        size = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,)
        self._note(torch.empty, size, {"dtype": tensor.dtype, "device": self.device}, [tensor])
        unmade = self._marked(tensor.detach())
        if isinstance(tensor, Parameter):
            unmade = Parameter(unmade)
            unmade.__dict__.update(vars(tensor))
        return unmade.requires_grad_(tensor.requires_grad)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            return self.adopt(func(*args, **{**kwargs, "device": "meta"}))
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation with such tensors, on the meta device: outputs have shapes.

        Raises:
            UsageError: It needs values that are not there.
        """
        name = "item" if func is value_of else func.overloadpacket.__name__.removeprefix("_")
        leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor))
        changed = written_by(func, args, kwargs)
        if not all([leaf.is_meta for leaf in changed]):
            raise _refusal(name, first)
        bare: Any = map_tree(lambda leaf: leaf.to("meta") if torch.is_tensor(leaf) else leaf, (args, kwargs))
        try:
            out = func(*bare[0], **bare[1])
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                raise _refusal(name, first) from error
            raise
        random = torch.Tag.nondeterministic_seeded in func.tags
        foreign = any([leaf.is_meta and memory_of(leaf) not in self._writers for leaf in leaves])
        refusal = _refusal(name, first) if foreign or (random and not changed) else None
        self._note(func, args, kwargs, flatten(out)[0], changed, random, refusal)
        return map_tree(self._marked, out)

    def asked(self, tensor: Tensor, frame: Any) -> None:
        """A function of torch.nn.init that looks for meta tensors will do nothing: it is noted as a whole."""
        code = frame.f_code
        if frame.f_globals.get("__name__") == "torch.nn.init":
            given = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
            function = getattr(torch.nn.init, code.co_name.removeprefix("_no_grad_"))
            self._note(function, (given.pop("tensor"),), given, [], [tensor], random=True)

    def _marked(self, out: Any) -> Any:
        """Return the result of an operation; as a `DeferredTensor` if its memory is recorded."""
        if not isinstance(out, torch.Tensor) or memory_of(out) not in self._writers:
            return out
        marked: Any = out if isinstance(out, DeferredTensor) else out.as_subclass(DeferredTensor)
        marked.recorder = self
        return marked

    def _note(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        outputs: list[Any],
        changed: Sequence[Tensor] = (),
        random: bool = False,
        refusal: UsageError | None = None,
    ) -> None:
        """Record what changes memory, or makes some; views do neither."""
        new = [torch.is_tensor(o) and o.is_meta and memory_of(o) not in self._writers for o in outputs]
        if not changed and not any(new):
            return
        views: Any = map_tree(_kept, (tuple(args), dict(kwargs)))
        read = {leaf.memory for leaf in flatten(views)[0] if isinstance(leaf, _View)}
        state = self._draw(function, *views) if random and refusal is None else None
        made = [memory_of(out) if is_new else None for out, is_new in zip(outputs, new, strict=True)]
        gives = len(changed) > 0 and len(read) == 1
        for key in dict.fromkeys([*map(memory_of, changed), *made]):
            if key is not None:
                self._writers.setdefault(key, []).append(len(self._steps))
        self._kept += [out.untyped_storage() for out, is_new in zip(outputs, new, strict=True) if is_new]
        self._steps.append(_Step(function, views[0], views[1], made, read, gives, state, refusal))

    @torch.no_grad()
    def _draw(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Draw once for the generator's sake; gives the state before."""
        state: Tensor = (kwargs.get("generator") or self._generator).get_state()
        args, kwargs = _seen((args, kwargs), lambda view: view.scratch(self.device))
        function(*args, **kwargs)
        return state

    def _history(self, key: int) -> list[_Step]:
        """All steps that lead to what is in a piece of memory, in their order."""
        wanted, numbers = {key}, set[int]()
        due = [-number for number in self._writers.get(key, [])]
        heapq.heapify(due)
        while due:
            number = -heapq.heappop(due)
            numbers.add(number)
            for other in self._steps[number].read - wanted:
                wanted.add(other)
                for earlier in self._writers.get(other, []):
                    if earlier < number:
                        heapq.heappush(due, -earlier)
        return [self._steps[number] for number in sorted(numbers)]

    def _repeat(self, step: _Step, real: dict[int, Any]) -> None:
        """Do it in real memory, by number."""
        if step.refusal is not None:
            raise step.refusal
        args, kwargs = _seen((step.args, step.kwargs), lambda view: view.of(real[view.memory]))
        if step.state is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator(self.device).set_state(step.state)
        elif step.state is not None:
            self._generator.set_state(step.state)
        outputs = flatten(step.function(*args, **kwargs))[0]
        real.update(
            {k: out.untyped_storage() for k, out in zip(step.made, outputs, strict=False) if k is not None}
        )


def _kept(leaf: Any) -> Any:
    """An argument as it is repeated later."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _View(leaf) if leaf.is_meta else leaf.detach().clone()


def _seen(tree: Any, how: Callable[[_View], Tensor]) -> Any:
    """Arguments with tensors in the place of views."""
    return map_tree(lambda leaf: how(leaf) if isinstance(leaf, _View) else leaf, tree)


def _refusal(name: str, tensor: Tensor) -> UsageError:
    return UsageError(
        f"{name} reads a tensor of shape {list(tensor.shape)} that has no values yet, under "
        f"init_module(empty_init=True). Leave empty_init out, or do this after fabric.setup."
    )
