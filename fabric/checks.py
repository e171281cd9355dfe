"""Argument checks of the setup verbs, which run before any change; and warnings about models and loaders that
were not set up.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Mapping
from functools import cache
from numbers import Real
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import DataParallel, Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.core._torch import BatchNorm, is_underway
from fabric.core.arguments import check_limits
from fabric.core.compile import is_compiled, recompile
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.messages import kind_of, show
from fabric.core.tree import flatten
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning, RanksDifferWarning
from fabric.wrappers import _FabricModule, is_wrapped, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORDS = {"true": True, "on": True, "false": False, "off": False, "0": False}
"""Values of FABRIC_REPLICA_CHECK that are not numbers."""
raw_iterations: list[tuple[weakref.ref[Any], weakref.ref[Any], str]] = []
"""Iterations with enabled gradients of loaders that were not set up and yield their whole dataset: the
iteration, its loader, a description."""
_warned_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Loaders for which a warning was printed."""
_warned_descriptions: set[str] = set()
"""Descriptions of loaders that were freed before the warning: `for batch in DataLoader(...)`."""
_SAMPLERS = (RandomSampler, SequentialSampler, WeightedRandomSampler, SubsetRandomSampler)
"""Samplers of torch that yield the same samples on all ranks."""


def check_not_set_up(objects: tuple[Any, ...], kind: type, verb: str) -> None:
    """Raise unless there is at least one object, and all are of torch's class `kind` and not set up yet."""
    if not objects:
        raise ConfigurationError(f"{verb} needs at least one {kind.__name__}.")
    for obj in objects:
        if is_wrapped(obj):
            raise _set_up_twice(obj, verb)
        if not isinstance(obj, kind):
            from fabric.core.advice import kind_advice

            raise ArgumentTypeError(
                f"{verb} needs torch's {kind.__name__}, but got {kind_of(obj)}."
                + kind_advice(verb, kind.__name__, obj)
            )


def _set_up_twice(obj: Any, verb: str) -> ConfigurationError:
    return ConfigurationError(
        f"{verb}: this {type(unwrap(obj)).__name__} is set up already. Set each up once and keep it."
    )


def check_module(module: Any, verb: str, strategy: Any) -> tuple[Module, Module]:
    """Return the module to set up, and the same without torch.compile. A DDP around it is removed.

    Args:
        module: The argument of `verb`.
        verb: The caller, for messages.
        strategy: Its layout may synchronise gradients between processes; has the models that are set up.

    Raises:
        ConfigurationError: It is set up already.
        ArgumentTypeError: Not a module.
        UsageError: It contains DDP or FSDP1, so that gradients would be synchronised twice.
    """
    if not isinstance(module, Module) or is_wrapped(module):
        check_not_set_up((module,), Module, verb)  # raises
    wrappers: tuple[Any, ...] = (DistributedDataParallel,)
    if strategy.layout.traits.needs_launch:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        wrappers = (*wrappers, DataParallel, *([fsdp.FullyShardedDataParallel] if fsdp else []))
    outer = inner = unwrap(module)
    if isinstance(outer, DistributedDataParallel | DataParallel) and isinstance(outer, wrappers):
        inner = unwrap(outer.module)
        rank_zero_warn(
            f"{verb} removed {type(outer).__name__} around your {type(inner).__name__}, because the strategy "
            "synchronises gradients itself. Leave it out, and pass its settings to the strategy."
        )
        module = recompile(outer.module, like=module) if is_compiled(module) else outer.module
    for path, part in inner.named_modules():
        if isinstance(part, wrappers):
            raise UsageError(
                f"{verb}: {path or 'this model'} is wrapped in {type(part).__name__} already, and the "
                f"strategy synchronises gradients itself. Give {verb} a model without it."
            )
    if inner in strategy.modules:
        raise _set_up_twice(module, verb)
    return module, inner


def warn_of_batch_norm(module: Module, device: torch.device) -> None:
    """Warn of batch norm layers, whose statistics are those of this rank's part of a batch."""
    found = [
        f"{path} ({type(part).__name__})"
        for path, part in module.named_modules()
        if isinstance(part, BatchNorm) and not isinstance(part, SyncBatchNorm) and part.training
    ]
    if found:
        fix = "use another norm"
        if device.type != "cpu":
            fix = (
                f"write model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup, or {fix}"
            )
        rank_zero_warn(
            f"{', '.join(found[:4])}{', ...' * bool(found[4:])}: batch norm in training sees only a rank's "
            f"part of each batch, so results differ from those of one process. For equal results, {fix}.",
            category=PossibleUserWarning,
        )


def warn_of_workers(loaders: tuple[Any, ...], ranks: int) -> None:
    """Warn if loaders have more workers, over all `ranks` of this machine, than it has cores.

    torch's own warning considers one process only.
    """
    most = max([loader.num_workers for loader in loaders])
    if most <= 1:
        return
    from fabric.core.cores import usable_cores
    from fabric.utilities.data import suggested_max_num_workers

    fair = suggested_max_num_workers(ranks)
    if most > fair:
        rank_zero_warn(
            f"num_workers={most} on each of the {ranks} ranks of this machine are {most * ranks} processes "
            f"in addition to the ranks, on {usable_cores()} cores. Write num_workers={fair}, a rank's share.",
            category=PossibleUserWarning,
        )


def warn_if_not_set_up(shards: int, no_model: bool) -> None:
    """Warn in a backward if no model was set up, and of each loader in `raw_iterations` that is iterated now.

    Args:
        shards: Number of ranks that read different data.
        no_model: Whether no model was set up.
    """
    if no_model:
        rank_zero_warn(
            "fabric.backward ran although no model was set up: each rank keeps its own gradients, and the "
            "models diverge. Write model, optimizer = fabric.setup(model, optimizer); or average the "
            "gradients yourself.",
            category=RanksDifferWarning,
        )
    for iteration, loader, data in [
        (iteration(), loader(), data) for iteration, loader, data in raw_iterations
    ]:
        warned = data in _warned_descriptions if loader is None else loader in _warned_loaders
        if iteration is None or warned or not is_underway(iteration):
            continue
        _warned_descriptions.add(data) if loader is None else _warned_loaders.add(loader)
        rank_zero_warn(
            f"A DataLoader that was not set up ({data}) is iterated in training. Unless each rank has its "
            f"own part, all {shards} ranks do the same work. Write loader = "
            "fabric.setup_dataloaders(loader) and iterate the result; if each rank has its own part, with "
            "use_distributed_sampler=False.",
            category=RanksDifferWarning,
        )


def record_raw_iterations() -> None:
    """Patch DataLoader to record iterations with torch's own samplers in `raw_iterations`."""
    original = DataLoader.__iter__
    if original.__module__ == __name__:
        return

    def recorded_iter(loader: Any) -> Any:
        iteration, batches = original(loader), loader.batch_sampler
        order = loader.sampler if batches is None else batches
        order = order.sampler if type(order) is BatchSampler else order
        if type(order) in _SAMPLERS and torch.is_grad_enabled():
            data = f"{type(loader.dataset).__name__} of {len(loader.dataset)}, batch_size={loader.batch_size}"
            alive = [entry for entry in raw_iterations if entry[0]() is not None]
            raw_iterations[:] = [*alive, (weakref.ref(iteration), weakref.ref(loader), data)]
        return iteration

    DataLoader.__iter__ = recorded_iter  # type: ignore[method-assign]


def check_optimizers(optimizers: tuple[Any, ...], verb: str) -> None:
    """Raise unless all can be set up: optimizers, each once, not yet wrapped.

    Wrappers such as Lookahead often do not call torch's constructor: they get what it sets for hooks.
    """
    check_not_set_up(optimizers, Optimizer, verb)
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise ConfigurationError(f"{verb}: the same optimizer was passed twice. Pass each once.")
    for optimizer in optimizers:
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})  # as for an optimizer that was pickled by an older torch


def check_owned(optimizers: tuple[Optimizer, ...], modules: list[Module], verb: str) -> None:
    """Raise if an optimizer holds parameters of no module in `modules`: they would not be synchronised.

    The search ends when all are found, so put the most likely modules first.
    """
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        unowned = {id(p): p for p in held}
        for module in modules:
            if not unowned:
                break
            for parameter in module.parameters():
                unowned.pop(id(parameter), None)
        foreign = [tuple(p.shape) for p in unowned.values()]
        if foreign:
            raise ConfigurationError(
                f"{verb}: {len(foreign)} of {len(held)} parameters of {type(optimizer).__name__} (shapes "
                f"{', '.join(map(str, foreign[:3]))}) belong to no model that is set up. Make the "
                f"optimizer from this model's .parameters(); or set up all its models with setup_module, "
                f"then optimizer = fabric.setup_optimizers(optimizer), which also takes other parameters."
            )


def check_schedule(value: Any) -> bool | int:
    """Return the schedule of the replica check for `Fabric(replica_check=value)`.

    Raises:
        ConfigurationError: Neither a bool nor a number of at least 1; `value` may be from the environment.
    """
    schedule, text = value, f"replica_check={value!r}"
    if value is None:
        schedule = os.environ.get("FABRIC_REPLICA_CHECK", "True")
        text = f"FABRIC_REPLICA_CHECK={schedule}"
        schedule = _WORDS.get(schedule.lower(), schedule)
        schedule = int(schedule) if isinstance(schedule, str) and schedule.isdecimal() else schedule
    if isinstance(schedule, bool) or (isinstance(schedule, int) and schedule > 0):
        return schedule
    raise ConfigurationError(
        f"{text} is not a schedule. Write True (after backwards number 1, 2, 4, ...), False (never), or a "
        "number of backwards between two checks, such as 100."
    )


def check_loggers(given: Any) -> list[Any]:
    """Return the loggers in a list; raises ArgumentTypeError for an object that cannot log."""
    for one in (loggers := _as_list(given)):
        if isinstance(one, type) or not callable(getattr(one, "log_metrics", None)):
            raise ArgumentTypeError(
                f"loggers={one!r:.60} has no log_metrics(metrics, step). Write for example "
                'loggers=CSVLogger("logs"), of fabric.loggers.'
            )
    return loggers


def check_callbacks(given: Any) -> list[Any]:
    """Return the callbacks in a list; raises ArgumentTypeError for one that defines no method."""
    for one in (callbacks := _as_list(given)):
        if one is None or isinstance(one, type | str | Real | FunctionType | BuiltinFunctionType):
            raise ArgumentTypeError(
                f"callbacks={one!r:.60} has no methods that fabric.call(name) could call. Write a class with "
                "a method such as on_train_epoch_end, and pass an object of it."
            )
    return callbacks


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


@cache  # once
def warn_of_no_logger() -> None:
    """Warn that values are logged without a logger."""
    rank_zero_warn(
        "fabric.log: this Fabric has no logger, so that nothing is written. Write for example "
        'Fabric(loggers=CSVLogger("logs")), of fabric.loggers.'
    )


def check_state(state: Any, verb: str) -> None:
    """Raise ArgumentTypeError unless `state` can be the dictionary of a load."""
    if not isinstance(state, Mapping):
        path = '"checkpoints"' if verb == "fabric.load_latest" else "path"
        raw = ", or fabric.load_raw(path, model) for a bare state dict" if verb == "fabric.load" else ""
        raise ArgumentTypeError(
            f"{verb} needs a dictionary, but got {kind_of(state)}. Write {verb}({path}, "
            f'{{"model": model}}){raw}.'
        )


def check_clipped(module: Any, optimizer: Any, limits: Mapping[str, Any], others: Iterable[Module]) -> None:
    """Raise unless `module` is a model, `optimizer` holds none of `others` alone, and there is one limit.

    Args:
        module: The model.
        optimizer: Its optimizer.
        limits: clip_val, max_norm and norm_type.
        others: All models that are set up.

    Raises:
        ArgumentTypeError: Not a model, or not an optimizer; or a limit is not a number.
        ConfigurationError: The optimizer is that of another model; both limits, none or a negative one.
    """
    kinds = {"the model": (module, isinstance(module, Module))}
    kinds["the model's optimizer"] = (optimizer, hasattr(optimizer, "param_groups"))
    for what, (given, right) in kinds.items():
        if not right:
            raise ArgumentTypeError(
                f"fabric.clip_gradients needs {what}, but got {kind_of(given)}. Write "
                "fabric.clip_gradients(model, optimizer, max_norm=1.0)."
            )
    check_limits(**limits)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held.isdisjoint(map(id, module.parameters())):
        return
    for other in others:
        if other is not module and not held.isdisjoint(map(id, other.parameters())):
            raise ConfigurationError(
                f"fabric.clip_gradients got {type(module).__name__} and an optimizer of another model, "
                f"{type(other).__name__}. Pass the model and the optimizer of its parameters."
            )


def check_comparable(objects: tuple[Any, ...]) -> None:
    """Raise ArgumentTypeError for an object with neither models nor optimizers nor tensors."""
    for obj in objects:
        leaves = flatten(obj)[0]
        if leaves and not any([isinstance(leaf, Module | Optimizer | torch.Tensor) for leaf in leaves]):
            raise ArgumentTypeError(
                f"fabric.check_replicas compares tensors, but {kind_of(obj)} has none. Pass models, "
                "optimizers or tensors, or write fabric.agree(value)."
            )


def check_forward_module(module: Any, verb: str) -> Module:
    """Return the module that the layout wrapped, of a model that is set up.

    Raises:
        UsageError: The model is not set up.
    """
    while is_compiled(module):
        module = module._orig_mod
    if not isinstance(module, _FabricModule):
        raise UsageError(
            f"{verb} needs a model that is set up, but got {kind_of(module)}. Write model = "
            "fabric.setup(model) first and pass that."
        )
    joined: Module = module._fabric_wrapped
    return joined


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric or collection of torchmetrics, which is not imported for it."""
    metrics = sys.modules.get("torchmetrics")
    return metrics is not None and isinstance(value, metrics.Metric | metrics.MetricCollection)


def metrics_among(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the torchmetrics among values to be logged, by name.

    Raises:
        ArgumentTypeError: Not a dictionary, or a name is not a str.
    """
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(
            f"fabric.log_dict needs a dictionary, but got {kind_of(values)}. Write "
            'fabric.log_dict({"loss": loss}), or fabric.log("loss", loss).'
        )
    if odd := [name for name in values if not isinstance(name, str)]:
        kind = type(odd[0]).__name__
        raise ArgumentTypeError(
            f'{odd[0]!r} ({kind}) is not a name: logged values need a str. Write fabric.log("loss", value).'
        )
    return {name: value for name, value in values.items() if is_metric(value)}


def check_function(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise unless `fabric.launch` can call `function` with a Fabric and these arguments.

    Raises:
        ArgumentTypeError: It is not callable, takes no positional argument, or other arguments than these.
    """
    if not callable(function) or isinstance(function, Module):
        raise ArgumentTypeError(
            f"fabric.launch(function) needs a function, but got {show(function)}. Write "
            "fabric.launch(train), not fabric.launch(train()): launch calls it, on every rank."
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may pass others
    except (TypeError, ValueError):  # builtins without a signature
        return
    name = getattr(function, "__name__", repr(function))
    if not [p for p in signature.parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]:
        raise ArgumentTypeError(
            f"fabric.launch calls {name}(fabric, ...), but {name} takes no argument. Write def "
            f"{name}(fabric)."
        )
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        given = [*map(show, args), *[f"{key}={show(value)}" for key, value in kwargs.items()]]
        raise ArgumentTypeError(
            f"fabric.launch calls {', '.join([f'{name}(fabric', *given])}), but it is def {name}{signature}: "
            f"{error}. Pass the arguments that it has after the Fabric: fabric.launch({name}, ...)."
        ) from None


def empty_module_error(module: Module) -> UsageError:
    """Return the error for a model on the meta device that the strategy does not initialise."""
    return UsageError(
        f"{type(module).__name__} has parameters on the meta device, which hold no values. Build it under "
        "`with fabric.init_module():`, or give it values with model.to_empty(device=fabric.device) and load "
        "them."
    )
