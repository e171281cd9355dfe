"""`StepUndo`: restores what training steps change, in place and bit for bit. Used by `search.py` only."""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import ProxyTypes

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from fabric.core.backward_listeners import add_step_listener, parameters_of
from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.data.loader import _FabricDataLoader
from fabric.utilities.seed import collect_rng_states, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable


_COUNTING = tuple(f"fabric.{name}." for name in ("data", "loss_check", "precision", "replicas", "strategies"))
"""Modules with objects that count steps and backwards, and check ranks in some of them."""


class StepUndo:
    """A context of training steps. Each exit restores the state of the time of creation.

    Restores modules, schedulers and set-up loaders of this process, optimizers that step in the context, the
    loss scale, random states, and the counters of Fabric. Values are copied to the host, so that the device
    has the memory of the steps alone.

    Args:
        strategy: Its models have no gradients.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._stack = ExitStack()
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._values: dict[int, tuple[Any, Any]] = {}
        self._optimizers: dict[int, Any] = {}
        self._positions: list[tuple[Any, Any]] = []
        self._counters: list[tuple[Any, dict[str, int]]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._scale = copy.deepcopy(strategy.precision.state_dict())
        self._rng = collect_rng_states()
        for live in gc.get_objects():
            kind = type(live)
            if issubclass(kind, Module) and not issubclass(kind, DistributedDataParallel):
                # Not DDP itself, which has another reducer after an error.
                self._keep(
                    [vars(live), *[value for value in vars(live).values() if issubclass(type(value), dict)]]
                )
            elif issubclass(kind, LRScheduler | _FabricDataLoader):
                self._keep([vars(live)])
                if (iteration := vars(live).get("_iteration")) is not None:
                    self._positions.append((iteration, iteration.position))
                if issubclass(kind, _FabricDataLoader):
                    drawn = [live._user_loader.generator, *getattr(live._adapter, "generators", ())]
                    found = {id(one): one for one in drawn if isinstance(one, torch.Generator)}
                    self._generators += [(one, one.get_state()) for one in found.values()]
            elif str(kind.__module__).startswith(_COUNTING) and hasattr(live, "__dict__"):
                # After an error on this rank only, its numbers differ from those of other ranks.
                numbers = {name: value for name, value in vars(live).items() if type(value) in (int, bool)}
                self._counters.append((live, numbers))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Copy the state of an optimizer before its first step."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            state = optimizer.state
            self._keep([vars(optimizer), *optimizer.param_groups, state, *state.values()])
            self._keep([dict(enumerate(parameters_of(optimizer)))])

    def __enter__(self) -> None:
        strategy, channel = self._strategy, self._strategy.channel()
        self._stack.callback(add_step_listener(self))
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
        for table, saved in self._tables:
            table.clear()
            table.update(saved)
        for tensor, value in self._values.values():
            tensor.data.copy_(value)
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
            held = [value for value in table.values() if type(value) not in ProxyTypes]  # which may be dead
            for value in flatten(held)[0]:
                if isinstance(value, torch.Tensor) and not value.is_meta and id(value) not in self._values:
                    local = value.to_local() if hasattr(value, "to_local") else value
                    if _is_freed(local):
                        continue  # its memory was freed, as that of FSDP's gathered parameters
                    self._values[id(value)] = local.detach(), local.detach().to("cpu", copy=True)


def _is_freed(tensor: Any) -> bool:
    """Whether a tensor has no memory, as FSDP's gathered parameters between calls: a copy is a SIGSEGV."""
    return bool(tensor.layout is torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes())
