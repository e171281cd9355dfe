"""Which modules of a model become groups that are sharded, gathered and freed together. Changes nothing."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_UNCALLED = NonDynamicallyQuantizableLinear
"""The output layer in torch's MultiheadAttention, whose parameters are used without a call of it."""

SMALL = 100_000
"""Elements below which a module is not worth messages of its own."""


def choose_blocks(model: Module, policy: Any, name: str, may_be_empty: bool = False) -> list[Module]:
    """The modules inside `model` that form groups of their own, innermost first. The rest goes with `model`.

    A module that shares a parameter with modules outside of it (tied weights) is never one: all uses of a
    parameter belong to one group.

    Args:
        model: The user's model.
        policy: None (automatic), module classes, a function (module) -> bool, or a policy of
            torch.distributed.fsdp.wrap; its functions are called with module=, recurse=, nonwrapped_numel=.
        name: Of the argument, for errors.
        may_be_empty: Whether a policy may match nothing here: it matched in another model.

    Raises:
        ArgumentTypeError: `policy` is none of these.
        ConfigurationError: `policy` matches no module.
    """
    if policy is None:
        chosen = _repeated(model)
    elif hasattr(policy, "_run_policy"):  # torch's ModuleWrapPolicy, CustomPolicy, LambdaWrapPolicy
        chosen = set(policy._run_policy(model, set(), {}))
    elif isinstance(policy, set | frozenset | list | tuple | type):
        chosen = _of_classes(model, _classes(policy, name))
    elif callable(policy):
        chosen = _accepted(model, policy)
    else:
        raise ArgumentTypeError(
            f"{name}={policy!r} must be a set of module classes or a function, but is a "
            f"{type(policy).__name__}. Write {name}={{TransformerBlock}}."
        )
    chosen = {m for m in chosen if m is not model and not isinstance(m, _UNCALLED)}
    if policy is not None and not chosen and not may_be_empty:
        kinds = sorted({type(m).__name__ for m in model.modules() if m is not model})
        raise ConfigurationError(
            f"{name}={_spell(policy)} matches no module inside {type(model).__name__}, which has "
            f"{', '.join(kinds) or 'no modules'}. Name classes of these, or leave {name} out to have them chosen."
        )
    uses = Counter([id(p) for m in model.modules() for p in m._parameters.values() if p is not None])
    return [m for m in _innermost_first(model) if m in chosen and _stands_alone(m, uses)]


def _repeated(model: Module) -> set[Module]:
    """Repeated blocks (siblings of one class in a container), and single modules that hold much by themselves."""
    total = sum([p.numel() for p in model.parameters()])
    least = min(1_000_000, max(SMALL, total // 100))
    chosen: set[Module] = set()

    def visit(module: Module) -> None:
        children = list(module.children())
        kinds = Counter([type(child) for child in children])
        for child in children:
            container = isinstance(child, ModuleList | ModuleDict | Sequential)
            size = sum([p.numel() for p in child.parameters()])
            repeated = kinds[type(child)] > 1 and isinstance(module, ModuleList | ModuleDict | Sequential)
            own = sum([p.numel() for p in child._parameters.values() if p is not None])
            if size >= least and (own >= least or (repeated and not container)):
                chosen.add(child)
            else:
                visit(child)

    visit(model)
    return chosen


def _classes(policy: Any, name: str) -> tuple[type, ...]:
    classes = (policy,) if isinstance(policy, type) else tuple(policy)
    wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, Module))]
    if wrong:
        raise ArgumentTypeError(
            f"{name} takes classes of modules, but has {wrong[0]!r}. Write {name}={{TransformerBlock}}."
        )
    return classes


def _of_classes(model: Module, classes: tuple[type, ...]) -> set[Module]:
    return {module for module in model.modules() if isinstance(module, classes)}


def _accepted(model: Module, policy: Callable[..., Any]) -> set[Module]:
    """What a function chooses: of one argument, asked for each module; or of torch's three, asked top down."""
    try:
        given = inspect.signature(policy).parameters
        several = "recurse" in given or any([p.kind is p.VAR_KEYWORD for p in given.values()])
    except (TypeError, ValueError):
        several = False
    if not several:
        return {module for module in model.modules() if module is not model and policy(module)}
    chosen: set[Module] = set()

    def visit(module: Module) -> int:
        """How many elements under `module` are in groups."""
        size = sum([p.numel() for p in module.parameters()])
        if not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        inside = sum([visit(child) for child in module.children()])
        if policy(module=module, recurse=False, nonwrapped_numel=size - inside):
            chosen.add(module)
            return size
        return inside

    visit(model)
    return chosen


def _stands_alone(module: Module, uses: Counter[int]) -> bool:
    inside = Counter([id(p) for m in module.modules() for p in m._parameters.values() if p is not None])
    return bool(inside) and all([uses[key] == count for key, count in inside.items()])


def _innermost_first(model: Module) -> Iterable[Module]:
    seen: set[Module] = set()

    def visit(module: Module) -> Iterable[Module]:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            yield from visit(child)
        yield module

    return visit(model)


def _spell(policy: Any) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if isinstance(policy, set | frozenset | list | tuple):
        return "{" + ", ".join(sorted([c.__name__ for c in policy])) + "}"
    return getattr(policy, "__name__", type(policy).__name__)
