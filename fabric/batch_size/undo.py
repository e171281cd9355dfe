"""`StepUndo`: restores what training steps change, in place and bit for bit. Used by `search.py` only."""

from __future__ import annotations

import atexit
import copy
import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import ProxyTypes

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.data.epochs import BegunEpochs
from fabric.data.loader import _FabricDataLoader
from fabric.data.order import epoch_of, set_epoch_of
from fabric.launch import garbage
from fabric.utilities.seed import collect_rng_states, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable


_COUNTING = tuple(f"fabric.{name}." for name in ("data", "loss_check", "precision", "replicas", "strategies"))
"""Modules with objects that count steps and backwards, and check ranks in some of them."""


_inherited: list[Any] = []
"""Objects of the process that forked this one, which must not be collected."""


class StepUndo:
    """A context of training steps. Each exit restores the state of the time of creation.

    Restores modules, optimizers, schedulers and set-up loaders of this process, the loss scale, random
    states, and the counters of Fabric. Values are copied to the host, so that the device has the memory of
    the steps alone.

    Args:
        strategy: Its models have no gradients.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._stack = ExitStack()
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._values: dict[int, tuple[Any, Any]] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._parameters: dict[int, tuple[Any, Any, bool]] = {}
        self._positions: list[tuple[Any, Any]] = []
        self._epochs: list[tuple[Any, int | None]] = []
        self._counters: list[tuple[Any, dict[str, int]]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._scale = copy.deepcopy(strategy.precision.state_dict())
        self._rng = collect_rng_states()
        for live in _live_objects():
            kind = type(live)
            if issubclass(kind, Module) and not issubclass(kind, DistributedDataParallel):
                # Not DDP itself, which has another reducer after an error.
                values = vars(live).values()
                self._keep([vars(live), *[value for value in values if issubclass(type(value), dict)]])
                self._keep_gradients(vars(live).get("_parameters", {}).values())
            elif issubclass(kind, Optimizer):
                if "_fabric_inner" not in vars(live):  # a view, whose optimizer is listed, too
                    self._keep_optimizer(live)
            elif issubclass(kind, LRScheduler):
                self._keep([vars(live)])
            elif issubclass(kind, _FabricDataLoader):
                self._keep_loader(live)
            elif kind is BegunEpochs:
                self._tables.append((vars(live), dict(vars(live))))
            elif str(kind.__module__).startswith(_COUNTING) and hasattr(live, "__dict__"):
                # After an error on this rank only, its numbers differ from those of other ranks.
                numbers = {name: value for name, value in vars(live).items() if type(value) in (int, bool)}
                self._counters.append((live, numbers))

    def _keep_gradients(self, parameters: Iterable[Any]) -> None:
        for p in parameters:
            if p is not None and p.is_leaf and id(p) not in self._parameters:
                self._parameters[id(p)] = p, p.grad, p.requires_grad
                self._keep([{"grad": p.grad}])

    def _keep_optimizer(self, optimizer: Any) -> None:
        own = vars(optimizer)
        self._keep([own])
        # Neither is there after a failed constructor, and both may be properties of another optimizer's.
        groups, state = own.get("param_groups") or [], own.get("state")
        tables = [state, *state.values()] if isinstance(state, dict) else []
        parameters = [p for group in groups for p in group["params"]]
        self._keep(
            [*[table for table in tables if isinstance(table, dict)], *groups, dict(enumerate(parameters))]
        )
        self._keep_gradients(parameters)

    def _keep_loader(self, loader: Any) -> None:
        self._keep([vars(loader)])
        adapter = loader._adapter
        sampler = getattr(adapter, "sampler", None)
        # The digest of the order, which a resume compares, the epoch, and workers that persist.
        for part in (adapter, sampler, getattr(sampler, "order", None), loader._dataloader):
            if hasattr(part, "__dict__"):
                self._tables.append((vars(part), dict(vars(part))))
        self._epochs += [(part, epoch_of(part)) for part in adapter.epoch_parts()]
        if (iteration := vars(loader).get("_iteration")) is not None:
            self._positions.append((iteration, iteration.position))
        drawn = [loader._user_loader.generator, *getattr(adapter, "generators", ())]
        found = {id(one): one for one in drawn if isinstance(one, torch.Generator)}
        self._generators += [(one, one.get_state()) for one in found.values()]

    def __enter__(self) -> None:
        strategy, channel = self._strategy, self._strategy.channel()
        for trial in strategy.hooks["trial"]:
            self._stack.enter_context(trial())
        # Nothing communicates, so replicas differ.
        for owner, name in ((strategy.layout, "after_sync"), (strategy, "facts_part"), (channel, "facts")):
            self._stack.enter_context(mock.patch.object(owner, name, None))
        # Gathered and reduced values are undefined, so norms may be infinite.
        self._stack.enter_context(mock.patch.object(strategy.layout.finite, "check"))

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        """Restore everything.

        Raises:
            UsageError: The steps took batches of an iteration that had begun before.
        """
        self._stack.close()
        moved = any([iteration.position != position for iteration, position in self._positions])
        for module in self._strategy.modules:
            module.zero_grad()
        for part, epoch in self._epochs:  # of the user's samplers and datasets
            if epoch is not None:
                set_epoch_of(part, epoch)
        for table, saved in self._tables:
            table.clear()
            table.update(saved)
        for values, saved_values in self._lists:
            values[:] = saved_values
        for tensor, value in self._values.values():
            tensor.data.copy_(value)
        for parameter, grad, requires_grad in self._parameters.values():
            parameter.grad = grad
            if parameter.requires_grad != requires_grad:  # frozen by a step that an error ended
                parameter.requires_grad_(requires_grad)
        for counting, numbers in self._counters:
            vars(counting).update(numbers)
        for generator, state in self._generators:
            generator.set_state(state)
        self._strategy.precision.load_state_dict(copy.deepcopy(self._scale))
        set_rng_states(self._rng)
        self._strategy.layout.reset_reductions()
        if moved:
            raise UsageError(
                "The step of fabric.find_batch_size took a batch of an iteration that had begun before. Its "
                "position cannot be restored. Write `batch = next(iter(loader))` in the step."
            )

    def _keep(self, tables: Iterable[dict[Any, Any]]) -> None:
        for table in tables:
            self._tables.append((table, dict(table)))
            self._lists += [(value, [*value]) for value in table.values() if type(value) is list]
            held = [value for value in table.values() if type(value) not in ProxyTypes]  # which may be dead
            for value in flatten(held)[0]:
                if isinstance(value, torch.Tensor) and not (
                    value.is_meta or is_lazy(value) or id(value) in self._values
                ):
                    local = value.to_local() if hasattr(value, "to_local") else value
                    if _is_freed(local):
                        continue  # its memory was freed, as that of FSDP's gathered parameters
                    self._values[id(value)] = local.detach(), local.detach().to("cpu", copy=True)


def _live_objects() -> list[Any]:
    """Return the objects of the garbage collector, with those of `gc.freeze()`, which it does not list."""
    if not garbage.was_forked:
        gc.unfreeze()
        return gc.get_objects()
    # A forked process must not collect inherited objects (`launch/garbage.py`). Freezing again would keep
    # all that is alive now, such as models that are deleted later.
    with garbage.gc_disabled():
        others = {id(one) for one in gc.get_objects()}
        gc.unfreeze()
        found = gc.get_objects()
        _inherited.extend([one for one in found if id(one) not in others])
    atexit.register(gc.freeze)  # Python's last collection
    return found


def _is_freed(tensor: Any) -> bool:
    """Whether a tensor has no memory, as FSDP's gathered parameters between calls: a copy is a SIGSEGV."""
    return bool(tensor.layout is torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes())
