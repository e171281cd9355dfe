"""Choice of the modules of a model that FSDP shards, unshards and frees together. Nothing is modified."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fabric.core._torch import is_fsdp
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.strategies.sharding._torch import POLICY_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_UNCALLED = NonDynamicallyQuantizableLinear
"""Type of the output layer of torch's MultiheadAttention, whose parameters are used without a call of it."""

_CLASSES = (set, frozenset, list, tuple)
"""Types of a collection of classes as a policy."""

SET_UP = "_fabric_set_up"
"""Attribute of modules that the strategy called `fully_shard` on."""

_SMALL = 100_000
"""Number of elements below which a module is no separate group."""


def check_policy(policy: Any, name: str) -> None:
    """Raise unless `choose_blocks` can use `policy`.

    Raises:
        ArgumentTypeError: `policy` has another type.
    """
    classes = policy if isinstance(policy, _CLASSES) else [policy]
    named = all([isinstance(kind, type) and issubclass(kind, Module) for kind in classes])
    function = callable(policy) and not isinstance(policy, Module | type)
    if not (policy is None or named or function or hasattr(policy, POLICY_METHOD)):
        raise ArgumentTypeError(
            f"{name}={policy!r} must be a set of module classes or a function (module) -> bool. "
            f"Write {name}={{TransformerBlock}}."
        )


def check_whole(model: Module) -> None:
    """Raise if `fully_shard` was called on a submodule, except those of models that were set up.

    Raises:
        UsageError: `fully_shard` was called on one; the error names it.
    """
    for path, module in model.named_modules():
        if is_fsdp(module) and (module is model or not hasattr(module, SET_UP)):
            raise UsageError(
                f"{path or 'This model'} ({type(module).__name__.removeprefix('FSDP')}) is sharded already: "
                "fully_shard was called on it. The strategy calls it at setup. Pass a model that is not "
                "sharded to fabric.setup, or call fully_shard in ModelParallelStrategy(parallelize_fn)."
            )


def choose_blocks(
    model: Module, policy: Any, name: str, may_be_empty: bool = False, alone: bool = True
) -> list[Module]:
    """Return the submodules that form groups, innermost first. All other parameters belong to the root group.

    With `alone`, a module without parameters, or with a parameter that modules outside of it use (tied
    weights), is never a group: all uses of a parameter must be in one group.

    Args:
        model: The user's model.
        policy: None (automatic), module classes (an empty set: no groups), a function (module) -> bool, or a
            policy of torch.distributed.fsdp.wrap; its functions are called with module=, recurse=,
            nonwrapped_numel=.
        name: Name of the argument, for errors.
        may_be_empty: Whether a policy may match nothing, since it matched in another model.
        alone: Whether modules that share parameters with others are excluded.

    Raises:
        ArgumentTypeError: `policy` is none of these.
        ConfigurationError: `policy` matches no module.
        UsageError: A submodule is sharded already.
    """
    check_policy(policy, name)
    check_whole(model)
    classes = (policy,) if isinstance(policy, type) else policy
    if policy is None:
        chosen = _repeated(model)
    elif hasattr(policy, POLICY_METHOD):  # torch's ModuleWrapPolicy, CustomPolicy
        chosen = _run(model, policy, name)
    elif isinstance(classes, _CLASSES):
        chosen = {module for module in model.modules() if isinstance(module, tuple(classes))}
    else:
        chosen = _accepted(model, policy)
    chosen = {m for m in chosen if m is not model and not isinstance(m, _UNCALLED)}
    empty = isinstance(policy, _CLASSES) and not policy
    if policy is not None and not (chosen or empty or may_be_empty):
        kinds = sorted({type(m).__name__ for m in model.modules() if m is not model})
        raise ConfigurationError(
            f"{name}={policy!r} matches no module inside {type(model).__name__}, which has "
            f"{', '.join(kinds) or 'no modules'}. Name classes of these, or leave {name} out."
        )
    uses = Counter([id(p) for m in model.modules() for p in m._parameters.values() if p is not None])
    return [m for m in innermost_first(model) if m in chosen and (not alone or _shares_no_parameter(m, uses))]


def _repeated(model: Module) -> set[Module]:
    """Return repeated blocks (siblings of one class in a container), and large single modules."""
    total = sum([p.numel() for p in model.parameters()])
    least = min(1_000_000, max(_SMALL, total // 100))
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


def _takes_torch_arguments(policy: Any) -> bool:
    """Whether a function has the three arguments of torch's policies."""
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):  # ValueError: a C function without a signature
        return False
    return True


def _run(model: Module, policy: Any, name: str) -> set[Module]:
    """Return the modules that a policy of torch.distributed.fsdp.wrap chooses."""
    chosen: dict[Module, dict[str, Any]] = getattr(policy, POLICY_METHOD)(model, set(), {})
    settings = next((own for own in chosen.values() if own), None)
    if settings:  # CustomPolicy may give keywords of FSDP1 for a module
        raise ConfigurationError(
            f"{name}: {type(policy).__name__} gives settings for single modules ({settings!r}), but all "
            f"groups have those of the strategy. Return True, and write them as FSDPStrategy(...)."
        )
    return set(chosen)


def _accepted(model: Module, policy: Callable[..., Any]) -> set[Module]:
    """Return the modules that a function chooses.

    A function of one argument is called for each module; one of torch's three arguments is called top down.
    """
    if not _takes_torch_arguments(policy):
        return {module for module in model.modules() if module is not model and policy(module)}
    chosen: set[Module] = set()

    def visit(module: Module) -> int:
        """Return the number of elements under `module` that are in groups."""
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


def _shares_no_parameter(module: Module, uses: Counter[int]) -> bool:
    inside = Counter([id(p) for m in module.modules() for p in m._parameters.values() if p is not None])
    return bool(inside) and all([uses[key] == count for key, count in inside.items()])


def innermost_first(model: Module) -> Iterable[Module]:
    """Return all modules of a model, each once, after the modules inside of it."""
    seen: set[Module] = set()

    def visit(module: Module) -> Iterable[Module]:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            yield from visit(child)
        yield module

    return visit(model)
