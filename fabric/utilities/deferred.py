"""`DeferredInit`: modules are built without memory for their weights, whose values are made later.

Used by layouts that shard. `torch.empty` gives tensors on the meta device (`Unmade`); what is done to them,
by constructors and by whoever initialises the model again before it is set up, is recorded, with the state
of the random generator, and replayed by `make`. Everything else is made as always.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fabric.core.errors import UsageError
from fabric.core.torch_internals import no_subclass_functions
from fabric.core.tree import flatten, map_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
_ASSIGNING = frozenset(
    [
        f"__i{verb}__"
        for verb in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    ]
)
_RANDOM = (
    "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
)  # fmt: skip


class _View:
    """How to see a part of a tensor once it has memory. No dataclass, so that it is a leaf of trees."""

    __slots__ = ("offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


@dataclass(frozen=True)
class _Step:
    """One thing that was done: `function(*args, **kwargs)`, drawn from `state`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Tensor | None = None
    derives: bool = False
    """Whether its result is a piece of memory of its own; else it changes the one before."""


@dataclass
class _Record:
    """What became of one piece of memory that is not there yet."""

    storage: Any  # kept, so that no other storage gets its address
    dtype: torch.dtype
    steps: list[_Step] = field(default_factory=list)
    """All that leads to its values, from an empty piece of memory on."""
    refusal: UsageError | None = None
    """Where it was computed in a way that cannot be repeated: raised if it is part of a model."""

    @property
    def initialised(self) -> bool:
        """Whether anybody gave it values."""
        return self.refusal is not None or not all([step.derives for step in self.steps])

    @property
    def numel(self) -> int:
        """Elements that fit into it."""
        return int(self.storage.nbytes() // self.dtype.itemsize)


class Unmade(torch.Tensor):
    """A tensor without memory that has its changes recorded, wherever they are made, and not carried out."""

    recorder: DeferredInit

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation on such tensors: changes are recorded, others are made on shapes."""
        with no_subclass_functions():
            found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Unmade)]
            return found[0].recorder.run(func, args, kwargs or {}) if found else func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = Parameter(copied, self.requires_grad) if isinstance(self, Parameter) else copied
        made: Tensor = memo[id(self)]
        return made

    def users_attributes(self) -> dict[str, Any]:
        """What has been set on the tensor, as on any other."""
        return {key: value for key, value in vars(self).items() if key not in ("recorder", "_is_param")}


class DeferredInit(TorchFunctionMode):
    """Context in which modules are built without memory for what `torch.empty` makes: nearly all parameters.

    The random generators move on as in a plain construction: each initialisation is drawn once on a scratch
    tensor, so that peak memory is one parameter. `make` gives a tensor the values of that construction.

    Args:
        device: Where the values will be drawn.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._records: dict[int, _Record] = {}
        self._building = False

    def __enter__(self) -> DeferredInit:
        self._building = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._building = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was given values, which `make` can repeat."""
        record = self._records.get(_key(tensor)) if tensor.is_meta else None
        return record is not None and record.initialised

    @torch.no_grad()
    def make(self, tensor: Tensor, replay: bool = True) -> Tensor:
        """Memory on the device for `tensor`, and with `replay` the values that it was given."""
        record = self._records[_key(tensor)]
        whole = self._replayed(record) if replay else self._empty(record.numel, record.dtype)
        part = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return part if part.numel() == whole.numel() else part.clone()

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _replayed(self, record: _Record) -> Tensor:
        """The piece of memory, flat, with its values."""
        if record.refusal is not None:
            raise record.refusal
        whole = torch.empty(0)
        before = _get_state(None, self.device)
        try:
            for step in record.steps:
                args, kwargs = _onto(step.args, whole), _onto(step.kwargs, whole)
                if step.state is not None and kwargs.get("generator") is not None:
                    kwargs["generator"] = torch.Generator(self.device).set_state(step.state)
                elif step.state is not None:
                    _set_state(step.state, self.device)
                made = step.function(*args, **kwargs)
                if step.derives:
                    numel = made.untyped_storage().nbytes() // made.dtype.itemsize
                    whole = made.as_strided((numel,), (1,), 0)
        finally:
            _set_state(before, self.device)
        return whole

    def _note(self, tensor: Tensor) -> None:
        """A piece of memory that is not there yet, and has no values."""
        record = self._records[_key(tensor)] = _Record(tensor.untyped_storage(), tensor.dtype)
        record.steps.append(_Step(self._empty, (record.numel, record.dtype), {}, derives=True))

    def forget(self, tensor: Tensor) -> None:
        """Let go of what is known of a tensor that has its values now."""
        self._records.pop(_key(tensor), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs = {**kwargs, "device": "meta"}
        out = func(*args, **kwargs)
        if type(out) is torch.Tensor and out.is_meta and getattr(func, "__name__", "") in _EMPTY:
            self._note(out)
            unmade = out.detach().as_subclass(Unmade)
            unmade.recorder = self
            return unmade.requires_grad_(out.requires_grad)
        return out

    def run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on tensors without memory; torch asks them nothing more while this runs."""
        name = getattr(func, "__name__", "")
        if _asks_is_meta(func):
            self._asked(args[0])
        changed = self._changed(func, name, args, kwargs)
        if changed is not None:
            self._record(func, args, kwargs, changed)
            return changed
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            return self._set_data(func, *args)
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            without = [t for t in flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.is_meta]
            if without and "meta" in str(error).lower():
                raise self._refusal(name, without[0]) from error
            raise
        if type(out) in (tuple, list):
            return type(out)([self._marked(leaf) for leaf in out])
        if isinstance(out, torch.Tensor) and out.is_meta and _key(out) not in self._records:
            if name in _EMPTY:
                self._note(out)
            else:
                self._derive(func, args, kwargs, out)
        return self._marked(out)

    def _marked(self, out: Any) -> Any:
        """What an operation gave; if it is recorded, then as a tensor that says so."""
        if not isinstance(out, torch.Tensor) or not out.is_meta or _key(out) not in self._records:
            return out
        marked: Any = out if isinstance(out, Unmade) else out.as_subclass(Unmade)
        marked.recorder = self
        return marked

    def _derive(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        """Note how a tensor was computed from one without values (`weight * 0.5`, `weight.half()`)."""
        known = [t for t in flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.is_meta]
        known = [t for t in known if _key(t) in self._records]
        if not known:
            return
        record = self._records[_key(out)] = _Record(out.untyped_storage(), out.dtype)
        source, name = self._records[_key(known[0])], getattr(func, "__name__", str(func))
        try:
            if "rand" in name or name in ("bernoulli", "dropout", "normal", "multinomial"):
                raise self._refusal(name, known[0])
            step = _Step(func, *self._kept(name, args, kwargs, known[0]), derives=True)
        except UsageError as error:
            if self._building:
                raise
            record.refusal = error  # later only if it matters: of activations nobody wants values
        else:
            record.refusal, record.steps = source.refusal, [*source.steps, step]

    def _set_data(self, func: Any, target: Tensor, value: Tensor) -> None:
        """`weight.data = values`: of a tensor without memory, a copy of them."""
        if not target.is_meta or value.is_meta or _key(target) not in self._records:
            func(target, value)
            if isinstance(value, Unmade) and isinstance(target, Unmade):
                target.recorder = value.recorder
        elif target.shape != value.shape or target.dtype != value.dtype:
            raise self._refusal("weight.data = other", target)
        else:
            step = _Step(torch.Tensor.copy_, (_View(target), value.detach().clone()), {})
            self._records[_key(target)].steps.append(step)

    def _changed(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """The known tensor without memory that this call changes; None: it changes none."""
        target = target_of(name, args, kwargs)
        held = (
            [leaf for leaf in target if isinstance(leaf, Unmade)] if isinstance(target, tuple | list) else []
        )
        if held:
            raise self._refusal(name, held[0])
        if not isinstance(target, torch.Tensor) or not target.is_meta:
            return None
        return target if _key(target) in self._records else None

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], target: Tensor) -> None:
        key = _key(target)
        name = getattr(func, "__name__", str(func))
        own_args, own_kwargs = self._kept(name, args, kwargs, target)
        random = name in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init"
        state = self._draw(func, own_args, own_kwargs, target) if random else None
        self._records[key].steps.append(_Step(func, own_args, own_kwargs, state))

    def _kept(self, name: str, args: Any, kwargs: dict[str, Any], target: Tensor) -> tuple[Any, Any]:
        """Arguments as they are repeated later; of tensors without values only `target` may be among them."""

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not leaf.is_meta:
                return leaf.detach().clone()
            if _key(leaf) != _key(target):
                raise self._refusal(name, leaf)
            return _View(leaf)

        return map_tree(kept, tuple(args)), map_tree(kept, dict(kwargs))

    def _refusal(self, name: str, tensor: Tensor) -> UsageError:
        return UsageError(
            f"{name} reads a tensor of shape {list(tensor.shape)} that has no values yet, under "
            f"init_module(empty_init=True). Leave empty_init out, or do this after fabric.setup."
        )

    @torch.no_grad()
    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], target: Tensor) -> Tensor:
        """Draw once for the generator's sake; gives the state before."""
        state = _get_state(kwargs.get("generator"), self.device)
        extent = target.storage_offset() + sum(
            [(n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)], 1
        )
        scratch = torch.empty(max(extent, 0), dtype=target.dtype, device=self.device)
        func(*_onto(args, scratch), **_onto(kwargs, scratch))
        return state

    def _asked(self, tensor: Tensor) -> None:
        """Record functions of torch.nn.init that do nothing for meta tensors (trunc_normal_)."""
        frame: Any = sys._getframe(2)
        while frame.f_code.co_name == "__torch_function__":  # of the tensor, and of modes
            frame = frame.f_back
        code = frame.f_code
        if frame.f_globals.get("__name__") != "torch.nn.init":
            return
        public = code.co_name.removeprefix("_no_grad_")
        given = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        if given.pop("tensor", None) is not None and _key(tensor) in self._records:
            self._record(getattr(torch.nn.init, public), (tensor,), given, tensor)


def target_of(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operation of this name changes the values of: a tensor, or a list of them; None: nothing."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if not (inplace or name == "__setitem__" or name in _ASSIGNING):
        return None
    return args[0] if args else kwargs.get("tensor")


def _asks_is_meta(func: Any) -> bool:
    """Whether the operation is `tensor.is_meta`."""
    return (
        getattr(func, "__name__", "") == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_meta
    )


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())  # one object as long as a record keeps it


def _onto(tree: Any, real: Tensor) -> Any:
    def leaf_onto(leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return real.as_strided(leaf.size, leaf.stride, leaf.offset)
        return leaf

    return map_tree(leaf_onto, tree)


def _get_state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
