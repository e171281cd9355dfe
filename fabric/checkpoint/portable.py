"""Conversion of checkpoint data to types that `torch.load(weights_only=True)` reads, and back."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core._torch import no_subclass_functions
from fabric.core.errors import ArgumentTypeError
from fabric.core.pickles import pickling_error
from fabric.core.tree import map_tree
from fabric.utilities.state_keys import PLAIN_DICTS, same_dict_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Size, torch.dtype, torch.device, torch.layout),
)
TAG = "__fabric_type__"


def placeholder_of(value: torch.Tensor) -> torch.Tensor:
    """Return the placeholder of a tensor for other ranks: on the meta device, with this rank as its owner."""
    placeholder = torch.empty_like(value, device="meta")
    placeholder.owner = dist.get_rank() if dist.is_initialized() else 0  # type: ignore[attr-defined]
    return placeholder


def to_placeholder(value: Any) -> Any:
    """Return the placeholder of a tensor that another rank writes; other values unchanged."""
    return placeholder_of(value) if isinstance(value, torch.Tensor) else value


def is_placeholder(value: Any) -> bool:
    """Whether a value is a placeholder that `placeholder_of` has made."""
    return isinstance(value, torch.Tensor) and hasattr(value, "owner") and value.is_meta


def owner_of(placeholder: Any) -> int:
    """Return the global rank that has the values of a placeholder."""
    owner: int = placeholder.owner
    return owner


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint that is read from the file at each use; it has shape and dtype before."""

    fill: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
    """Reads the part at these offsets, of the shape of a tensor, into that tensor."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> LazyTensor:
        """Return a tensor that `fill` reads."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.fill = fill
        return made

    def read(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return its values."""
        return self.fill(torch.empty(self.shape, dtype=self.dtype) if into is None else into, [0] * self.ndim)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation on the values."""
        asked = getattr(getattr(func, "__self__", func), "__name__", "")  # of a getter: the attribute's name
        with no_subclass_functions():
            if asked not in _FACTS:
                args, kwargs = map_tree(read_stored, tuple(args)), map_tree(read_stored, kwargs or {})
            return func(*args, **(kwargs or {}))


_FACTS = {"shape", "dtype", "ndim", "layout", "requires_grad", "is_quantized", "is_nested"}
_FACTS |= {"size", "dim", "numel"}


def read_stored(value: Any) -> Any:
    """Return the values of a `LazyTensor`; other values unchanged."""
    return value.read() if isinstance(value, LazyTensor) else value


def to_portable(data: Any, name: str, allow_pickle: bool = False) -> Any:
    """Return `data` in types that safe loading reads; paths and numpy values become tagged dictionaries.

    Args:
        data: Any nesting of dict, list, tuple, set with plain values, tensors, paths and numpy arrays in it.
        name: Its name in errors (`state['config']`).
        allow_pickle: Whether objects of other types are allowed, as copies made by pickle.

    Raises:
        ArgumentTypeError: A value of another type; the message names its place.
    """
    kind = type(data)
    if kind is bytes and not data:  # pickled as a call of bytes(), which safe loading refuses
        return {TAG: "no_bytes"}
    if kind in _PLAIN or (kind is torch.Tensor and not data.is_meta and not data.__dict__):
        return data
    if isinstance(data, torch.Tensor):
        _check_tensor(data, name)
        return data
    if isinstance(data, dict) and not hasattr(kind, "__dataclass_fields__"):
        keys = [key if type(key) in (str, int) else _plain_key(key, name) for key in data]
        return same_dict_type(
            data, {key: to_portable(data[key], f"{name}[{key!r}]", allow_pickle) for key in keys}
        )
    if kind in (list, tuple):
        return kind([to_portable(value, f"{name}[{i}]", allow_pickle) for i, value in enumerate(data)])
    if kind is set:
        return {_plain_key(value, name) for value in data}
    if isinstance(data, PurePath):
        return {TAG: "path", "value": str(data)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(data, numpy.generic)):
        try:
            return _tagged_array(numpy, data, name)
        except ArgumentTypeError:  # objects, strings, records, dates
            if not allow_pickle:
                raise
    if not allow_pickle:
        way = "Or pickle it by fabric.save(..., allow_pickle=True); loading it then needs weights_only=False."
        raise ArgumentTypeError(f"{_refusal(data, name)} {way}")
    try:
        file = io.BytesIO()
        _ObjectPickler(file).dump(data)
        return pickle.loads(file.getbuffer())
    except Exception as error:
        reason = pickling_error(error, data, name)
        raise ArgumentTypeError(f"{name} cannot be pickled ({reason}). Save plain data of it.") from error


class _ObjectPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        """Return None, so that `obj` is pickled. Raise for a tensor that is sharded over ranks."""
        if isinstance(obj, torch.Tensor) and hasattr(obj, "device_mesh"):
            raise TypeError("it holds a tensor that is sharded over ranks")


def from_portable(data: Any, stored: bool = False) -> Any:
    """Undo `to_portable`: return a copy with paths and numpy values, whose tensors own their memory.

    Tensors of a memory-mapped file must not outlive the load: if the file is overwritten in place, reading
    them crashes the process. With `stored`, `LazyTensor`s are not read.
    """
    if isinstance(data, LazyTensor):
        return data if stored else data.read()
    if isinstance(data, torch.Tensor):
        copied = data.detach().clone()
        if isinstance(data, torch.nn.Parameter):
            return torch.nn.Parameter(copied, data.requires_grad)
        return copied.requires_grad_(data.requires_grad)
    if type(data) in PLAIN_DICTS:
        if data.get(TAG) in _READERS:
            return _READERS[data[TAG]](data)
        return same_dict_type(data, {key: from_portable(value, stored) for key, value in data.items()})
    if type(data) in (list, tuple):
        return type(data)([from_portable(value, stored) for value in data])
    return data


def module_entries(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's saved state to load from. Values of parameters and buffers are not copied, since
    loading copies them.
    """
    copied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    copied |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    owners = {name for name, _ in module.named_modules(remove_duplicate=False)}
    # Other entries of its submodules are kept as they are: extra states, the states of a torchmetrics metric.
    kept = [
        key
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or (key not in copied and key.rpartition(".")[0] in owners)
    ]
    return same_dict_type(state, {**state, **{key: from_portable(state[key]) for key in kept}})


def _plain_key(key: Any, name: str) -> Any:
    parts = key if type(key) is tuple else (key,)
    if all([type(part) in _PLAIN and part != b"" for part in parts]):
        return key
    raise ArgumentTypeError(
        f"{name} holds the key {key!r} of type {type(key).__name__}. Use str or int for the keys of a "
        f"dictionary and the members of a set."
    )


def _check_tensor(data: torch.Tensor, name: str) -> None:
    if data.is_meta and not is_placeholder(data):
        raise ArgumentTypeError(
            f"{name} is on the meta device and holds no values. Give it some before saving, for example with "
            f"model.to_empty(device=fabric.device) and loading."
        )
    kind = type(data)
    known = kind.__module__.partition(".")[0] == "torch" or kind in torch.serialization.get_safe_globals()
    if not known:
        raise ArgumentTypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, a kind of tensor that safe loading would "
            f"not read back. Save {name}.as_subclass(torch.Tensor)."
        )
    for attribute, value in vars(data).items():  # pickled with the tensor
        if kind in (torch.Tensor, torch.nn.Parameter) and type(value) not in _PLAIN:
            raise ArgumentTypeError(_refusal(value, f"{name}.{attribute}"))


def _tagged_array(numpy: Any, data: Any, name: str) -> dict[str, Any]:
    native = numpy.array(data, dtype=data.dtype.newbyteorder("="))  # a copy: torch would share its memory
    try:
        tensor = torch.from_numpy(native)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is a numpy value of dtype {data.dtype}, which torch has no type for. "
            "Save numbers or bools, or pickle it by fabric.save(..., allow_pickle=True); loading it then "
            "needs weights_only=False."
        ) from None
    tag = "ndarray" if isinstance(data, numpy.ndarray) else "numpy_scalar"
    return {TAG: tag, "value": tensor, "dtype": data.dtype.str}


def _read_array(data: dict[str, Any]) -> Any:
    array: Any = from_portable(data["value"]).numpy()
    array = array.astype(data["dtype"], copy=False)
    return array if data[TAG] == "ndarray" else array[()]


_READERS: dict[Any, Any] = {
    "no_bytes": lambda data: b"",
    "path": lambda data: Path(data["value"]),
    "ndarray": _read_array,
    "numpy_scalar": _read_array,
}


def _refusal(data: Any, name: str) -> str:
    kind = type(data)
    if hasattr(kind, "_fields"):
        way = f"Save {name}._asdict()."
    elif hasattr(kind, "__dataclass_fields__"):
        way = f"Save dataclasses.asdict({name})."
    else:
        way = (
            "Save plain data (numbers, strings, tensors, dict, list, tuple), or give it state_dict() and "
            "load_state_dict()."
        )
    text = f"{kind.__module__}.{kind.__qualname__}, which safe loading would not read back. {way}"
    return f"{name} is {'an' if text[0] in 'aeio' else 'a'} {text}"
