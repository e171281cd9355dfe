"""`EmptyInit`: construct modules without initial values. Also finds meta parameters, and names modules."""

from __future__ import annotations

import math
import sys
import weakref
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fabric.core._torch import INIT_FILLS
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

RANK_LOCAL = "_fabric_rank_local"
"""Attribute of modules: names of their buffers that each rank keeps for itself. Copied with the module."""
MODEL_NAME = "_fabric_name"
"""Attribute of a module that was set up: `model 0 (Actor)`, numbered in the order of setup."""

_OWNERS: dict[int, tuple[Any, dict[str, str]]] = {}
"""For the id of a parameter, until it is freed: the models that had it at setup, and its name in each."""

# Helpers, of one operation, of nn.init functions that call no __torch_function__ (xavier_*, ones_). Other
# functions run in full: trunc_normal_ repeats until its values fit, which NaN never does.
_FILLS = frozenset({*INIT_FILLS, "kaiming_normal_"})


class EmptyInit(TorchFunctionMode):
    """Context in which `torch.nn.init` functions write NaN, for weights that are loaded afterwards.

    With weights that were not loaded the first loss is NaN. Integer tensors are unchanged.
    `trunc_normal_`, `orthogonal_`, `sparse_`, `eye_` and `dirac_` still run.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" or _called_from_fill():
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.detach().fill_(torch.nan)
            return tensor
        return func(*args, **kwargs)


def has_meta_parameters(module: nn.Module) -> bool:
    """Whether a parameter or buffer of `module` is on the meta device, which holds no values."""
    return any([tensor.is_meta for tensor in chain(module.parameters(), module.buffers())])


def _called_from_fill() -> bool:
    caller = sys._getframe(2)
    return caller.f_code.co_name in _FILLS and caller.f_globals.get("__name__") == "torch.nn.init"


def describe_module(module: nn.Module) -> str:
    """Return a description that is equal for modules with equal parameters: `Net: 4 tensors, ...`."""
    if lazy := [name for name, tensor in module.named_parameters() if is_lazy(tensor)]:
        raise UsageError(
            f"{type(module).__name__} has parameters without a shape ({lazy[0]}), of a lazy module. Run one "
            "batch through the model before fabric.setup."
        )
    tensors = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    digest = blake2b(repr(tensors).encode(), digest_size=3).hexdigest()
    count = sum([math.prod(shape) for _, shape, _ in tensors])
    return f"{type(module).__name__}: {len(tensors)} tensors, {count} elements, names and shapes {digest}"


def name_of(module: nn.Module) -> str:
    """Return `model 0 (Actor)`; for a module that was not set up its class name."""
    return str(module.__dict__.get(MODEL_NAME, type(module).__name__.removeprefix("FSDP")))


def remember_owner(module: nn.Module) -> None:
    """Record the parameters of a model that was set up, for labels that are equal on all ranks: one of them
    may have deleted the model, and an optimizer keeps its parameters.
    """
    label = name_of(module)
    for name, parameter in module.named_parameters():  # no call of a function of ours for each
        known, names = _OWNERS.get(key := id(parameter), (None, {}))
        if known is None or known() is not parameter:
            names = {}
        forget = weakref.ref(parameter, lambda _, key=key: _OWNERS.pop(key, None))  # type: ignore[misc]
        _OWNERS[key] = forget, {**names, label: name}


def name_of_parameter(parameter: Tensor) -> str | None:
    """Return the name that a parameter had in the model that was set up; None: it was in none."""
    return next(iter(_names_of(parameter).values()), None)


def named_by_owner(parameter: Tensor) -> str | None:
    """Return `weight of model 0 (Actor)`, also of a model that was deleted; None: it was in none."""
    return next((f"{name} of {label}" for label, name in _names_of(parameter).items()), None)


def _names_of(parameter: Tensor) -> dict[str, str]:
    known, names = _OWNERS.get(id(parameter), (None, {}))
    return names if known is not None and known() is parameter else {}


def names_of_owners(parameters: Iterable[Tensor], models: Iterable[nn.Module]) -> str:
    """Return `model 0 (Actor), model 2 (Critic)`: the names of models that have any of the parameters, also
    of models that were deleted; `models` are searched for parameters that were added after setup.
    """
    found: dict[str, Any] = {}
    unknown = set()
    for parameter in parameters:
        if names := _names_of(parameter):
            found.update(names)
        else:
            unknown.add(id(parameter))
    for model in models if unknown else ():
        if not unknown.isdisjoint(map(id, model.parameters())):
            found[name_of(model)] = None
    return ", ".join(found)


class NeedsJob(int):
    """Whether a model has DDP around it. The first entry of its wrapper, so that it is unpickled before DDP.

    Raises:
        UsageError: When it is unpickled: there is no process group.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_needs_job, (int(self),)


def _unpickle_needs_job(needs_group: int) -> NeedsJob:
    if needs_group and not torch.distributed.is_initialized():
        raise UsageError(
            "This model was pickled in a job of several ranks, whose process group ended with it. Write "
            'torch.save(model.module, path) there, or fabric.save(path, {"model": model}).'
        )
    return NeedsJob(needs_group)
