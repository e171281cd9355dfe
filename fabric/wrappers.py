"""Wrappers of modules and optimizers that `fabric.setup` returns.

Invariants. A module wrapper shares the tables of the user's module, and its `forward` is the strategy's plan.
An optimizer wrapper is a view: its class derives from the user's class, and its attributes are those
of the real optimizer.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import cache
from operator import attrgetter, contains, delitem, getitem, setitem
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fabric.core._torch import MODULE_TABLES
from fabric.core.arguments import attribute_of, missing_attribute
from fabric.core.compile import is_compiled
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.lazy import lazy_names
from fabric.core.tree import map_tree
from fabric.data.loader import _FabricDataLoader
from fabric.utilities.init import NeedsJob, name_of, names_of_owners
from fabric.utilities.state_keys import clean_keys, fit_keys, warn_if_unloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer
    from typing_extensions import Self

__getattr__ = lazy_names(__name__)

_COMPILED = "_orig_mod."


def _device_of(module: Module, strategy: Any) -> torch.device:
    """Return the device of inputs: of the module's first tensor, or the rank's if that is sharded or meta."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    first = next((tensor for tensor in tensors if not tensor.is_meta), None)
    uses_root = first is None or strategy.traits.splits_parameters
    device: torch.device = strategy.root_device if uses_root else first.device  # type: ignore[union-attr]
    return device


def _dtype_of(module: Module, strategy: Any) -> torch.dtype:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())


_TENSOR_PROPERTIES: dict[str, Callable[[Module, Any], Any]] = {"device": _device_of, "dtype": _dtype_of}
"""`model.device` and `model.dtype` of modules that do not define them. Both change with `.to()`."""


class _FabricModule(Module):
    """The user's module with the forward plan of a strategy. All other attributes are the user's module's.

    The wrapper and the user's module share the dictionaries of `MODULE_TABLES`. So torch reads and writes
    parameters, children and hooks of state dicts on the user's module, also in `functional_call`.

    Args:
        forward_module: The module that runs forwards: the user's module, or DDP around it, compiled or not.
        strategy: The strategy, which makes the plans.
        original_module: The user's module; None: `forward_module` itself.
    """

    def __init__(self, forward_module: Module, strategy: Any, original_module: Module | None = None) -> None:
        original = original_module if original_module is not None else forward_module
        super().__init__()
        own = self.__dict__
        own["_fabric_job"] = NeedsJob(type(forward_module).__name__ == "DistributedDataParallel")
        own["_forward_module"] = forward_module  # not in _modules: children are those of the user's module
        own["_strategy"] = strategy
        # The module that the layout wrapped. Methods other than forward run uncompiled, synchronised by it.
        own["_fabric_wrapped"] = forward_module._orig_mod if is_compiled(forward_module) else forward_module
        own["_fabric_marked"] = set(getattr(original, "_fabric_forward_methods", ()))
        own["forward"] = strategy.forward_plan(forward_module)
        own.update({name: original.__dict__[name] for name in MODULE_TABLES if name in original.__dict__})
        own["training"] = original.training
        own["_fabric_original"] = original

    @property
    def module(self) -> Module:
        """The user's module."""
        original: Module = self.__dict__["_fabric_original"]
        return original

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Run another method of the module like forward: with precision and gradient synchronisation.

        Raises:
            ConfigurationError: The method is `forward` itself.
            ArgumentTypeError: `method` is neither a name nor a method.
            AttributeError: The module has no such method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        if name is None:
            raise ArgumentTypeError(
                f"mark_forward_method takes a method or its name, but got {type(method).__name__}. "
                f'Write model.mark_forward_method("generate").'
            )
        if name == "forward":
            raise ConfigurationError(
                "mark_forward_method('forward'): forward needs no mark. Mark other methods."
            )
        if not callable(getattr(self.module, name, None)):
            raise AttributeError(
                f"mark_forward_method({name!r}): {type(self.module).__name__} has no method {name!r}."
            )
        self._fabric_marked.add(name)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the unsharded state dict under the user's own keys. Arguments as for torch's `state_dict`.

        If parameters are sharded, all ranks must call this.
        """
        if self._strategy.traits.splits_parameters and not kwargs.get("keep_vars"):
            return self._full_state(args[0] if args else kwargs.get("destination"), prefix)
        state: dict[str, Any] = self.module.state_dict(*args, prefix=prefix, **kwargs)
        cleaned = clean_keys(state)
        if cleaned is not state:
            state.clear()  # in place: torch returns the caller's destination
            state.update(cleaned)
            state._metadata = cleaned._metadata  # type: ignore[attr-defined]
        return state

    def _full_state(self, destination: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
        strategy = self._strategy
        strategy.check_barrier("state_dict", f"of {name_of(self.module)}")
        full: dict[str, Any] = strategy.get_module_state_dict(self)
        if destination is None and not prefix:
            return full
        destination = {} if destination is None else destination
        destination.update({prefix + key: value for key, value in full.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load a `state_dict` with the user's keys, or a compiled module's. Arguments as for torch's.

        If parameters are sharded, all ranks must call this.
        """
        if self._strategy.layout_loads:
            result = self._strategy.load_module_state_dict(self, dict(state_dict), strict)
        else:
            fitted = fit_keys(state_dict, self.module)  # type: ignore[arg-type]
            result = self.module.load_state_dict(fitted, strict=strict, **kwargs)
        warn_if_unloaded(result, state_dict)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A parent module loads `state_dict`, whose keys do not have the prefix of compiled modules.
        for key in [key for key in self.module.state_dict() if _COMPILED in key]:
            name = f"{prefix}{key.replace(_COMPILED, '')}"
            if name in state_dict:
                state_dict[prefix + key] = state_dict.pop(name)
        self.module._load_from_state_dict(state_dict, prefix, *args)  # which may be overridden

    def train(self, mode: bool = True, *args: Any, **kwargs: Any) -> Self:
        """Set `mode` of the user's module and its wrappers; `args`, `kwargs` are for the user's `train`."""
        if args or kwargs:
            self.module.train(mode, *args, **kwargs)
        else:
            self._forward_module.train(mode)
        self._copy_mode()
        return self

    def _copy_mode(self) -> None:
        """Set the mode of the user's module for the modules around it, too."""
        self.__dict__["training"] = self._forward_module.training = self.module.training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None; to zero if `set_to_none` is False."""
        self.module.zero_grad(set_to_none)

    def apply(self, fn: Callable[[Module], None]) -> Self:
        """Apply `fn` to the user's module and all its submodules."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        from fabric.utilities.conversion import convert

        convert(self, fn, recurse)
        return self

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """The user's module and its submodules, by the user's names. Arguments as for torch's method."""
        for name, module in self.module.named_modules(memo, prefix, remove_duplicate):
            if not is_compiled(module):
                yield f"{name}.".replace(_COMPILED, "").removesuffix("."), module

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_fabric_original" not in own:  # while copying or unpickling
            raise AttributeError(name)
        original, strategy = own["_fabric_original"], own["_strategy"]
        plain = strategy.plain_methods and name not in own["_fabric_marked"]
        added = None if plain else strategy.layout.model_method(own["_fabric_wrapped"], name)
        if added is not None:
            return strategy.method_plan(own["_fabric_wrapped"], added, False)
        try:
            value = getattr(original, name)
        except AttributeError as error:
            if name not in _TENSOR_PROPERTIES or hasattr(type(original), name):
                raise missing_attribute("model", original, name, error)  # noqa: B904
            return _TENSOR_PROPERTIES[name](original, strategy)
        if not plain and isinstance(value, MethodType) and value.__self__ is original:
            return strategy.method_plan(own["_fabric_wrapped"], value, name in own["_fabric_marked"])
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "module":
            raise UsageError(
                f"model.module is your own {type(self.module).__name__}. Write model.module.module = ... to "
                "set its attribute 'module'."
            )
        # Assigning `forward` replaces that of the user's module; the plan stays.
        is_own = name in own or hasattr(type(self), name)
        if "_fabric_original" not in own or (is_own and name != "forward"):
            super().__setattr__(name, value)
        else:
            setattr(own["_fabric_original"], name, value)

    def __delattr__(self, name: str) -> None:
        if name != "forward" and name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for copied in self._strategy.hooks["copied"]:
            copied(self)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})


def _or_users(name: str) -> Callable[..., Any]:
    """Return a method of nn.Module that calls the user's module, if its class overrides the method."""
    plain = getattr(Module, name)

    def call(self: _FabricModule, *args: Any, **kwargs: Any) -> Any:
        original = self.__dict__.get("_fabric_original")  # None: while copying or unpickling
        if original is None or getattr(type(original), name, plain) is plain:
            return plain(self, *args, **kwargs)
        result = getattr(original, name)(*args, **kwargs)
        self._copy_mode()
        return self if result is original else result

    call.__name__ = name
    call.__doc__ = f"Call `{name}` of the user's class, else torch's. Arguments as for torch's."
    return call


for _name in (
    *("eval", "requires_grad_", "parameters", "named_parameters", "buffers", "named_buffers", "children"),
    *("named_children", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"),
):
    setattr(_FabricModule, _name, _or_users(_name))


class _FabricContainer(_FabricModule):
    """The wrapper of `nn.Sequential`, `nn.ModuleDict` and the like, with indexing, `len` and iteration."""


def _on_module(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, *args: operation(model.module, *args)


# Python looks special methods up on the class.
for _operation in (getitem, setitem, delitem, len, iter, contains, bool):
    setattr(_FabricContainer, f"__{_operation.__name__}__", _on_module(_operation))


class _FabricOptimizer:
    """A view of the user's optimizer, an instance of its class, whose `step` is the strategy's.

    All other attributes and methods are looked up on the real optimizer.

    Args:
        optimizer: The real optimizer.
        strategy: The strategy, which makes the step plan.
        callbacks: Objects whose `on_after_optimizer_step(strategy=, optimizer=)` is called after each step.
    """

    def __new__(
        cls, optimizer: Optimizer, strategy: Any, callbacks: list[Any] | None = None
    ) -> _FabricOptimizer:
        view: _FabricOptimizer = object.__new__(_view_type(type(optimizer)))  # type: ignore[arg-type]
        return view

    def __init__(self, optimizer: Optimizer, strategy: Any, callbacks: list[Any] | None = None) -> None:
        own = self.__dict__
        own["_fabric_inner"] = optimizer
        own["_fabric_strategy"] = strategy
        own["_fabric_plan"] = strategy.step_plan(optimizer)
        own["_fabric_callbacks"] = [
            callback
            for callback in callbacks or []
            if callable(getattr(callback, "on_after_optimizer_step", None))
        ]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: a registry in `__init_subclass__` of the user's optimizer must not contain views."""

    @property
    def optimizer(self) -> Optimizer:
        """The real optimizer."""
        inner: Optimizer = self.__dict__["_fabric_inner"]
        return inner

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run a step, with loss scaling and the strategy's part. All ranks must call this.

        Return the result of the optimizer's `step`, which gets `closure` (computes the loss) and `kwargs`.
        """
        own = self.__dict__
        inner, plan = own["_fabric_inner"], own["_fabric_plan"]
        if plan is not None:
            result = plan(inner, **kwargs) if closure is None else plan(inner, closure=closure, **kwargs)
        else:
            # Looked up each time: schedulers replace `step` of the instance by one that counts.
            result = inner.step(**kwargs) if closure is None else inner.step(closure, **kwargs)
        for callback in own["_fabric_callbacks"]:
            callback.on_after_optimizer_step(strategy=own["_fabric_strategy"], optimizer=inner)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of `param_group`. All ranks must call this.

        Raises:
            UsageError: The strategy cannot add parameters after setup.
        """
        params = param_group["params"]
        params = [params] if hasattr(params, "requires_grad") else list(params)
        plain = [p[1] if isinstance(p, tuple) else p for p in params]
        layout = self.__dict__["_fabric_strategy"].layout
        layout.check_added(plain)
        layout.add_free_parameters(plain, self.optimizer)
        self.optimizer.add_param_group({**param_group, "params": params})

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Call `zero_grad` of the real optimizer with `args` and `kwargs`."""
        # The inherited method would read each attribute through the view.
        return self.__dict__["_fabric_inner"].zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded state of the real optimizer. If it is sharded, all ranks must call this."""
        strategy = self.__dict__["_fabric_strategy"]
        if strategy.traits.splits_optimizers:
            tensors = [p for group in self.optimizer.param_groups for p in group["params"]]
            owners = names_of_owners(tensors, strategy.modules)
            strategy.check_barrier("state_dict", f"of {type(self.optimizer).__name__} of {owners}")
        state: dict[str, Any] = strategy.get_optimizer_state(self.optimizer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an unsharded `state_dict`. If the optimizer is sharded, all ranks must call this."""
        self.__dict__["_fabric_strategy"].load_optimizer_state(self.optimizer, state_dict)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_fabric_inner")
        if inner is None:  # while copying or unpickling
            raise AttributeError(name)
        return attribute_of("optimizer", inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Schedulers replace `step` of their instance by one that counts.
        if name == "step":
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FabricOptimizer:
        own = self.__dict__
        inner = deepcopy(own["_fabric_inner"], memo)
        return _FabricOptimizer(inner, own["_fabric_strategy"], own["_fabric_callbacks"])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        own = self.__dict__
        return _FabricOptimizer, (own["_fabric_inner"], own["_fabric_strategy"], own["_fabric_callbacks"])

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.optimizer)})


def _inner_method(name: str) -> property:
    def bound(view: Any) -> Any:
        inner = view.__dict__["_fabric_inner"]
        return view.__dict__["_fabric_strategy"].layout.optimizer_method(inner, getattr(inner, name))

    return property(bound)


@cache
def _view_type(kind: type) -> type:
    """Return the class of views of optimizers of class `kind`; one per class, so that types compare equal."""
    names = {*dir(kind), "param_groups", "state", "defaults"}
    # Properties for all names of the class: the inner instance may override any of them.
    members = {name: property(attrgetter(f"_fabric_inner.{name}")) for name in names if name[:2] != "__"}
    for name in members.keys() - {*dir(torch.optim.Optimizer)}:
        if isinstance(getattr(kind, name, None), FunctionType):
            members[name] = _inner_method(name)
    for name in set(members) & set(vars(_FabricOptimizer)):
        del members[name]
    return type(f"Fabric{kind.__name__}", (_FabricOptimizer, kind), {"__module__": __name__, **members})


def unwrap(obj: Any) -> Any:
    """Return the user's object inside wrappers and torch.compile; any other `obj` unchanged."""
    while True:
        if isinstance(obj, _FabricModule):
            obj = obj.module
        elif isinstance(obj, _FabricOptimizer):
            obj = obj.optimizer
        elif isinstance(obj, _FabricDataLoader):
            obj = obj._dataloader
        elif type(obj).__name__ == "OptimizedModule":  # is_compiled inlined, for one Python frame less
            obj = obj._orig_mod
        else:
            return obj


def _unwrap_objects(collection: Any) -> Any:
    """Return the nested `collection` with each object unwrapped."""
    return map_tree(unwrap, collection)


def is_wrapped(obj: object) -> bool:
    """Whether `fabric.setup`, `setup_module`, `setup_optimizers` or `setup_dataloaders` returned `obj`."""
    while type(obj).__name__ == "OptimizedModule":
        obj = obj._orig_mod  # type: ignore[attr-defined]
    return isinstance(obj, _FabricModule | _FabricOptimizer | _FabricDataLoader)
