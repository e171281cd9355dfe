"""`DeferredInit`: constructs modules on the meta device, and records how their weights are initialised.

Used by layouts that shard. In the context `torch.empty` returns meta tensors (`DeferredTensor`). Operations
on them, in constructors or later before setup, are recorded with the state of the random generator. `make`
replays them on the device.
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
        """Return the tensor in this storage."""
        bare = torch.empty(0, dtype=self.dtype, device=storage.device)
        return bare.set_(storage, self.offset, self.size, self.stride)

    def scratch(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Operation:
    """A recorded operation: `function(*args, **kwargs)`, with the generator's `state`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    new_memory: list[int | None]
    """Ids of the storages that it creates, by output; None: the output is no new storage."""
    read: set[int]
    """Ids of the storages of its arguments."""
    gives_values: bool = False
    """Whether it initialises values."""
    state: Tensor | None = None
    error: UsageError | None = None
    """The error to raise in a replay; None: it can be replayed."""


class DeferredTensor(torch.Tensor):
    """A meta tensor whose operations are recorded."""

    recorder: DeferredInit

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record every operation on such tensors; without dispatch inside."""
        found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, DeferredTensor)]
        with no_subclass_dispatch():
            return found[0].recorder.run(func, args, kwargs or {})

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True. Some functions of torch.nn.init do nothing for meta tensors: they are recorded here."""
        self.recorder.record_init_function(self, sys._getframe(1))
        return True

    @property
    def data(self) -> Tensor:
        """The `data` of the tensor; assignment copies the values."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.device.type == "meta":
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif self.shape != value.shape or self.dtype != value.dtype:
            raise _unsupported("weight.data = other", self)
        else:
            self.detach().copy_(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would copy a number to the meta device, where its value is lost.
        super().__setitem__(index, torch.as_tensor(value, dtype=self.dtype))

    def unrecorded(self) -> Tensor:
        """Return a meta tensor of the same storage whose operations are not recorded."""
        return _View(self).of(self.untyped_storage())

    def users_attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on the tensor."""
        return {key: value for key, value in vars(self).items() if key not in ("recorder", PARAMETER_MARK)}


class DeferredInit(TorchFunctionMode):
    """Context in which modules are constructed with meta tensors in place of `torch.empty`, as parameters
    are.

    The random generators advance as in a plain construction: each initialisation is drawn once into a
    temporary tensor, so peak memory is one parameter. `make` returns the values of that construction.

    Args:
        device: Device on which values are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self._generator = device, default_generator(device)
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        """{id of a storage: indices of operations that wrote to it}."""
        self._recordable: list[Any] = []
        """References to storages, so that their ids are not reused."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredInit:
        return self

    def has_values(self, tensor: Tensor) -> bool:
        """Whether the tensor was initialised."""
        return any([step.gives_values for step in self._history(memory_of(tensor))])

    @torch.no_grad()
    def make(self, tensor: Tensor, replay: bool = True) -> Tensor:
        """Return `tensor` on the device; with `replay` initialised by its recorded operations.

        Raises:
            UsageError: An operation cannot be replayed.
        """
        view, real = _View(tensor), dict[int, Any]()
        if not replay:
            return view.scratch(self.device)
        before = self._generator.get_state()
        try:
            for step in self._history(view.memory):
                self._replay(step, real)
        finally:
            self._generator.set_state(before)
        part, storage = view.of(real[view.memory]), real[view.memory]
        return part if part.nbytes == storage.nbytes() else part.clone()

    def adopt(self, tensor: Tensor) -> Any:
        """Return a meta tensor as a `DeferredTensor`, whose operations are recorded from now on."""
        size = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,)
        self._record(torch.empty, size, {"dtype": tensor.dtype, "device": self.device}, [tensor])
        unmade = self._as_deferred(tensor.detach())
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
        """Run an operation on the meta device, and record it.

        Raises:
            UsageError: It needs values of a meta tensor.
        """
        name = "item" if func is value_of else func.overloadpacket.__name__.removeprefix("_")
        leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor))
        changed = written_by(func, args, kwargs)
        if not all([leaf.is_meta for leaf in changed]):
            raise _unsupported(name, first)
        bare: Any = map_tree(lambda leaf: leaf.to("meta") if torch.is_tensor(leaf) else leaf, (args, kwargs))
        try:
            out = func(*bare[0], **bare[1])
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                raise _unsupported(name, first) from error
            raise
        random = torch.Tag.nondeterministic_seeded in func.tags
        foreign = any([leaf.is_meta and memory_of(leaf) not in self._writers for leaf in leaves])
        unsupported = _unsupported(name, first) if foreign or (random and not changed) else None
        self._record(func, args, kwargs, flatten(out)[0], changed, random, unsupported)
        return map_tree(self._as_deferred, out)

    def record_init_function(self, tensor: Tensor, frame: Any) -> None:
        """Record the call of a function of torch.nn.init that does nothing for meta tensors."""
        code = frame.f_code
        if frame.f_globals.get("__name__") == "torch.nn.init":
            given = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
            function = getattr(torch.nn.init, code.co_name.removeprefix("_no_grad_"))
            self._record(function, (given.pop("tensor"),), given, [], [tensor], random=True)

    def _as_deferred(self, out: Any) -> Any:
        """Return the result of an operation; as a `DeferredTensor` if its memory is recorded."""
        if not isinstance(out, torch.Tensor) or memory_of(out) not in self._writers:
            return out
        marked: Any = out if isinstance(out, DeferredTensor) else out.as_subclass(DeferredTensor)
        marked.recorder = self
        return marked

    def _record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        outputs: list[Any],
        changed: Sequence[Tensor] = (),
        random: bool = False,
        error: UsageError | None = None,
    ) -> None:
        """Record an operation that changes or creates a storage; views do neither."""
        new = [torch.is_tensor(o) and o.is_meta and memory_of(o) not in self._writers for o in outputs]
        if not changed and not any(new):
            return
        views: Any = map_tree(_recordable, (tuple(args), dict(kwargs)))
        read = {leaf.memory for leaf in flatten(views)[0] if isinstance(leaf, _View)}
        state = self._draw(function, *views) if random and error is None else None
        new_memory = [memory_of(out) if is_new else None for out, is_new in zip(outputs, new, strict=True)]
        gives_values = len(changed) > 0 and len(read) == 1
        for key in dict.fromkeys([*map(memory_of, changed), *new_memory]):
            if key is not None:
                self._writers.setdefault(key, []).append(len(self._operations))
        self._recordable += [
            out.untyped_storage() for out, is_new in zip(outputs, new, strict=True) if is_new
        ]
        self._operations.append(
            _Operation(function, views[0], views[1], new_memory, read, gives_values, state, error)
        )

    @torch.no_grad()
    def _draw(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Advance the generator as the operation does; return its state before."""
        state: Tensor = (kwargs.get("generator") or self._generator).get_state()
        args, kwargs = _replace_views((args, kwargs), lambda view: view.scratch(self.device))
        function(*args, **kwargs)
        return state

    def _history(self, key: int) -> list[_Operation]:
        """Return all operations that the values of a storage depend on, in order."""
        wanted, numbers = {key}, set[int]()
        due = [-number for number in self._writers.get(key, [])]
        heapq.heapify(due)
        while due:
            number = -heapq.heappop(due)
            numbers.add(number)
            for other in self._operations[number].read - wanted:
                wanted.add(other)
                for earlier in self._writers.get(other, []):
                    if earlier < number:
                        heapq.heappush(due, -earlier)
        return [self._operations[number] for number in sorted(numbers)]

    def _replay(self, step: _Operation, real: dict[int, Any]) -> None:
        """Replay an operation on real storages, by id."""
        if step.error is not None:
            raise step.error
        args, kwargs = _replace_views((step.args, step.kwargs), lambda view: view.of(real[view.memory]))
        if step.state is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator(self.device).set_state(step.state)
        elif step.state is not None:
            self._generator.set_state(step.state)
        outputs = flatten(step.function(*args, **kwargs))[0]
        real.update(
            {
                k: out.untyped_storage()
                for k, out in zip(step.new_memory, outputs, strict=False)
                if k is not None
            }
        )


def _recordable(leaf: Any) -> Any:
    """Return an argument in the form in which it is recorded."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _View(leaf) if leaf.is_meta else leaf.detach().clone()


def _replace_views(tree: Any, how: Callable[[_View], Tensor]) -> Any:
    """Return arguments with tensors in place of `_View`s."""
    return map_tree(lambda leaf: how(leaf) if isinstance(leaf, _View) else leaf, tree)


def _unsupported(name: str, tensor: Tensor) -> UsageError:
    return UsageError(
        f"{name} reads a tensor of shape {list(tensor.shape)} that has no values yet, under "
        f"init_module(empty_init=True). Leave empty_init out, or do this after fabric.setup."
    )
