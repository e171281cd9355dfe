"""What `fabric.setup` gives back: the user's module, optimizer and loader with a plan in place, and nothing else.

Invariants. A module wrapper holds the wrapped module as its one child and the forward plan as its instance's `forward`.
An optimizer wrapper is a view: its class derives from the user's class, its data are properties onto the real one.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Parameter

_COMPILED = "_orig_mod."


class _FabricModule(Module):
    """The user's module behind a forward plan. Attributes, methods and state dict keys are the user's module's own.

    Args:
        forward_module: What forwards go through (the user's module, or DDP around it, compiled or not).
        strategy: Gives the plans.
        original_module: The user's module; None: `forward_module` itself.
    """

    def __init__(self, forward_module: Module, strategy: Any, original_module: Module | None = None) -> None:
        super().__init__()
        self._forward_module = forward_module
        own = self.__dict__
        own["_strategy"] = strategy
        own["_marked"] = set(getattr(original_module or forward_module, "_fabric_forward_methods", ()))
        # Not registered as a child: it is inside forward_module already.
        own["_original"] = original_module or forward_module
        own["forward"] = strategy.forward_plan(forward_module)

    @property
    def module(self) -> Module:
        """The user's module."""
        original: Module = self.__dict__["_original"]
        return original

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Give another method of the module what forward has: precision, gradient sync.

        Raises:
            ConfigurationError: The method is `forward` itself.
            AttributeError: The module has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ConfigurationError(
                "mark_forward_method('forward'): forward needs no mark. Mark other methods."
            )
        if not callable(getattr(self.module, name, None)):
            raise AttributeError(
                f"mark_forward_method({name!r}): {type(self.module).__name__} has no method {name!r}."
            )
        self._marked.add(name)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's state dict under the user's own keys."""
        state = self.module.state_dict(*args, prefix=prefix, **kwargs)
        if not any([_COMPILED in key for key in state]):
            return state
        for key in list(state):  # in place: torch returns the caller's destination
            state[key.replace(_COMPILED, "")] = state.pop(key)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load a state dict under the user's own keys (or those of a compiled module)."""
        own = {key.replace(_COMPILED, ""): key for key in self.module.state_dict()}
        fitted = {own.get(key.replace(_COMPILED, ""), key): value for key, value in state_dict.items()}
        return self.module.load_state_dict(fitted, strict=strict, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The module's parameters under the user's own names."""
        for name, parameter in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace(_COMPILED, ""), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers under the user's own names."""
        for name, buffer in self.module.named_buffers(prefix, recurse, remove_duplicate):
            yield name.replace(_COMPILED, ""), buffer

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in own.get("_modules", ()):
            return own["_modules"][name]
        if "_original" not in own:  # while copying or unpickling
            raise AttributeError(name)
        original = own["_original"]
        value = getattr(original, name)
        if isinstance(value, MethodType) and value.__self__ is original and not hasattr(Module, name):
            return own["_strategy"].method_plan(
                own["_modules"]["_forward_module"], value, name in own["_marked"]
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "_original" not in own or name in own or name in own["_modules"] or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(own["_original"], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})


_OWN_SLOTS = frozenset({"_fabric_inner", "_fabric_plan", "_fabric_strategy", "_fabric_callbacks", "step"})


class _FabricOptimizer:
    """A view of the user's optimizer: of the same class, with the same data, whose step goes through the strategy.

    Args:
        optimizer: The real one.
        strategy: Gives the step plan.
        callbacks: Objects whose `on_after_optimizer_step(strategy=, optimizer=)` is called after each step.
    """

    def __new__(
        cls, optimizer: Optimizer, strategy: Any, callbacks: list[Any] | None = None
    ) -> _FabricOptimizer:
        return object.__new__(_view_type(type(optimizer)))

    def __init__(self, optimizer: Optimizer, strategy: Any, callbacks: list[Any] | None = None) -> None:
        hooks = [getattr(c, "on_after_optimizer_step", None) for c in callbacks or []]
        own = self.__dict__
        own["_fabric_inner"] = optimizer
        own["_fabric_strategy"] = strategy
        own["_fabric_plan"] = strategy.step_plan(optimizer)
        own["_fabric_callbacks"] = [
            c for c, hook in zip(callbacks or [], hooks, strict=True) if callable(hook)
        ]

    @property
    def optimizer(self) -> Optimizer:
        """The real optimizer."""
        inner: Optimizer = self.__dict__["_fabric_inner"]
        return inner

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step, with what precision and strategy add to it (loss scaling); gives what the optimizer gives."""
        own = self.__dict__
        # The real step is looked up each time: a scheduler may have put a counting one on the instance.
        step = own["_fabric_plan"]
        if closure is not None:
            kwargs["closure"] = closure
        result = own["_fabric_inner"].step(**kwargs) if step is None else step(own["_fabric_inner"], **kwargs)
        for callback in own["_fabric_callbacks"]:
            callback.on_after_optimizer_step(strategy=own["_fabric_strategy"], optimizer=own["_fabric_inner"])
        return result

    def state_dict(self) -> dict[str, Any]:
        """The full state of the real optimizer."""
        state: dict[str, Any] = self.__dict__["_fabric_strategy"].get_optimizer_state(self.optimizer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state into the real optimizer."""
        self.__dict__["_fabric_strategy"].load_optimizer_state(self.optimizer, state_dict)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_fabric_inner")
        if inner is None:  # while copying or unpickling
            raise AttributeError(name)
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_SLOTS:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.__dict__
        return _FabricOptimizer, (own["_fabric_inner"], own["_fabric_strategy"], own["_fabric_callbacks"])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __repr__(self) -> str:
        return repr(self.optimizer)


def _onto_inner(name: str) -> property:
    def get(self: _FabricOptimizer) -> Any:
        return getattr(self.optimizer, name)

    def put(self: _FabricOptimizer, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(get, put)


@cache
def _view_type(kind: type) -> type:
    """The class of views onto optimizers of class `kind`; one per class, so that comparisons of types hold."""
    members = {name: _onto_inner(name) for name in ("param_groups", "state", "defaults")}
    return type(f"Fabric{kind.__name__}", (_FabricOptimizer, kind), {"__module__": __name__, **members})


class _FabricDataLoader:
    """A loader whose batches arrive on a device. Everything else is the user's loader.

    Args:
        dataloader: The (sharded copy of the) user's loader.
        device: Where batches go; None leaves them where the loader puts them.
        move: Function (batch, device) that moves a batch.
    """

    def __init__(
        self,
        dataloader: Any,
        device: torch.device | None = None,
        move: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        self._dataloader = dataloader
        self._device = device
        if move is None:
            from fabric.utilities.apply_func import move_data_to_device as move
        self._move = move
        self._epoch = 0

    @property
    def device(self) -> torch.device | None:
        """Where batches go; None leaves them where the loader puts them."""
        return self._device

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is; counted by itself otherwise."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch. The first iteration is epoch 0, the next one 1, also after a break."""
        loader = self._dataloader
        for part in ("batch_sampler", "sampler", "dataset"):
            set_epoch = getattr(getattr(loader, part, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        self._epoch += 1
        # On the host nothing walks the batch: torch's own iterator is the plan.
        if self._device is None or self._device.type == "cpu":
            return iter(loader)
        return self._moved()

    def _moved(self) -> Iterator[Any]:
        move, device = self._move, self._device
        for batch in self._dataloader:
            yield move(batch, device)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # while copying or unpickling
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def unwrap(obj: Any) -> Any:
    """The user's own object inside wrappers and torch.compile; any other object is given back."""
    while True:
        if isinstance(obj, _FabricModule):
            obj = obj.module
        elif isinstance(obj, _FabricOptimizer):
            obj = obj.optimizer
        elif isinstance(obj, _FabricDataLoader):
            obj = obj._dataloader
        elif is_compiled(obj):
            obj = obj._orig_mod
        else:
            return obj


def is_compiled(obj: object) -> bool:
    """Whether `obj` is what `torch.compile(module)` gave."""
    # By name: importing the class would load all of dynamo.
    return isinstance(obj, Module) and type(obj).__name__ == "OptimizedModule" and hasattr(obj, "_orig_mod")


def recompile(module: Module, like: Any) -> Module:
    """`module` compiled with the settings of `like`, a result of `torch.compile`."""
    compiled: Module = like.dynamo_ctx(module)
    return compiled


def is_wrapped(obj: object) -> bool:
    """Whether `obj` came out of `fabric.setup`, `setup_module`, `setup_optimizers` or `setup_dataloaders`."""
    while is_compiled(obj):
        obj = obj._orig_mod  # type: ignore[attr-defined]
    return isinstance(obj, _FabricModule | _FabricOptimizer | _FabricDataLoader)


def check_module(module: Any, verb: str) -> None:
    """Raise unless `module` can be set up: a module, not yet wrapped."""
    if is_wrapped(module):
        raise ConfigurationError(
            f"{verb}: this {type(unwrap(module)).__name__} is set up already. Set each model up once and keep the result."
        )
    if not isinstance(module, Module):
        raise ArgumentTypeError(f"{verb} needs a torch.nn.Module first, but got {type(module).__name__}.")


def check_optimizers(optimizers: tuple[Any, ...], verb: str) -> None:
    """Raise unless all can be set up: optimizers, each once, not yet wrapped."""
    for optimizer in optimizers:
        if is_wrapped(optimizer):
            raise ConfigurationError(
                f"{verb}: this {type(unwrap(optimizer)).__name__} is set up already. Set each optimizer up once."
            )
        if not isinstance(optimizer, Optimizer):
            scheduler = hasattr(optimizer, "get_last_lr")
            hint = " Schedulers need no setup: keep using yours as it is." if scheduler else ""
            raise ArgumentTypeError(
                f"{verb} needs torch optimizers, but got {type(optimizer).__name__}.{hint}"
            )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise ConfigurationError(f"{verb}: the same optimizer was passed twice. Pass each once.")


def check_owned(optimizers: tuple[Optimizer, ...], modules: list[Module], verb: str) -> None:
    """Raise if an optimizer holds parameters of no module that is set up: they would not be synchronised."""
    owned = {id(p) for module in modules for p in module.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [tuple(p.shape) for p in held if id(p) not in owned]
        if foreign:
            raise ConfigurationError(
                f"{verb}: {len(foreign)} of {len(held)} parameters of {type(optimizer).__name__} (shapes "
                f"{', '.join(map(str, foreign[:3]))}) belong to no model that is set up. Make the optimizer from this "
                f"model's .parameters(), or set all its models up with setup_module first, then setup_optimizers."
            )


def check_forward_module(module: Any, verb: str) -> Module:
    """The wrapped module behind a model that is set up; raises for one that is not."""
    while is_compiled(module):
        module = module._orig_mod
    if not isinstance(module, _FabricModule):
        raise UsageError(
            f"{verb} needs a model that is set up, but got {type(module).__name__}. "
            f"Write model = fabric.setup(model) first and pass that."
        )
    forward_module: Module = module._forward_module
    while is_compiled(forward_module):
        forward_module = forward_module._orig_mod  # type: ignore[assignment]
    return forward_module


def check_loaders(loaders: tuple[Any, ...]) -> None:
    """Raise unless all can be set up: at least one, all DataLoaders, none wrapped yet."""
    if not loaders:
        raise ConfigurationError("fabric.setup_dataloaders() needs at least one DataLoader.")
    for loader in loaders:
        if is_wrapped(loader):
            raise ConfigurationError(
                "fabric.setup_dataloaders: this loader is set up already. Set each up once."
            )
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise ArgumentTypeError(
                f"fabric.setup_dataloaders needs torch.utils.data.DataLoader objects, got {type(loader).__name__}."
            )
