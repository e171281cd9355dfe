"""`ShardedStates`: `Replicate` with optimizer states sharded (ZeRO stage 1).

Each rank steps the parameters that it owns, holds their states, and broadcasts them after the step.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.portable import read_stored, to_placeholder
from fabric.collectives.objects import broadcast_tree, gather_objects
from fabric.core.backward_listeners import parameters_of
from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError, UsageError
from fabric.core.tree import map_tree
from fabric.strategies.ddp.replicate import Replicate
from fabric.strategies.zero1._torch import UNCOMPILED
from fabric.strategies.zero1.joint import couples_parameters
from fabric.strategies.zero1.shares import (
    OptimizerShard,
    RejectPartialStateDict,
    ShardStep,
    assign_owners,
    broadcast_from_owners,
    optimizer_view,
)
from fabric.utilities.init import names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


class ShardedStates(Replicate):
    """Parameters and gradients on every rank, the optimizer state of each parameter on one rank.

    The user's optimizer object is kept. In its step, torch's step hooks replace it by a view: of the same
    class, with the same state, and with groups of this rank's parameters only. So the optimizer and the
    gradients are never modified, not even after an error in the step.

    Args:
        settings: As in `Replicate`.
    """

    traits = replace(Replicate.traits, splits_optimizers=True, replicates=("parameters", "buffers"))

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._shards: weakref.WeakKeyDictionary[Optimizer, OptimizerShard] = weakref.WeakKeyDictionary()
        self._stepping: OptimizerShard | None = None
        """Shard of the step whose parameters are broadcast next."""

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the same optimizer, which steps this rank's shard. All ranks must call this.

        Raises:
            ConfigurationError: Its states cannot be sharded.
        """
        optimizer = super().setup_optimizer(optimizer)
        if self.register_optimizer(optimizer) is not None:
            self._current_shard(optimizer)
        return optimizer

    def register_optimizer(self, optimizer: Optimizer) -> OptimizerShard | None:
        """Return the optimizer's shard; the first call registers step hooks. None on one rank. No
        communication.
        """
        if self.channel is None or self.channel.world_size == 1:
            return None
        shard = self._shards.get(optimizer)
        if shard is None:
            _check_shardable(optimizer)
            compiled = getattr(optimizer.__dict__.get("step"), UNCOMPILED, None)
            if compiled is not None:
                optimizer.step = compiled  # type: ignore[method-assign]
            shard = self._shards[optimizer] = OptimizerShard()
            first = optimizer.register_step_post_hook(self._post_step_hook)
            # First, so that hooks of the user run after the broadcast.
            first.hooks_dict_ref().move_to_end(first.id, last=False)  # type: ignore[union-attr]
            shard.handles = [
                first,
                optimizer.register_step_pre_hook(self._pre_step_hook),
                RejectPartialStateDict(optimizer, "this rank's share").handle,
                optimizer.register_load_state_dict_pre_hook(self._without_others_state),
            ]
        return shard

    def collective_step(
        self, optimizer: Optimizer, plan: Callable[..., Any] | None
    ) -> Callable[..., Any] | None:
        """Return `plan` (None: the optimizer's step) such that an error on one rank is raised on all.

        Also registers the hooks of a copied or unpickled optimizer, which has none.
        """
        if self.register_optimizer(optimizer) is None:
            return plan
        # torch.compile must not trace messages.
        step: Callable[..., Any] = torch.compiler.disable(CollectiveStep(self, plan))
        return step

    def optimizer_method(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method followed by a broadcast of the parameters that it changed, from their owners."""
        if self.register_optimizer(optimizer) is None:
            return method

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            params = self._current_shard(optimizer, keeps_states=True).params
            before = [(p._version, p.data_ptr()) for p in params]
            result = method(*args, **kwargs)
            changed = [old != (p._version, p.data_ptr()) for old, p in zip(before, params, strict=True)]
            if any(changed):
                self._broadcast_changed(optimizer, method.__name__, changed)
            return result

        return run

    def _broadcast_changed(self, optimizer: Optimizer, name: str, changed: list[bool]) -> None:
        shard, group = self._shards[optimizer], self._group().collective.group
        verb = f"{type(optimizer).__name__}.{name}, which changed parameters"
        gathered = gather_objects(changed, self._group(), verb)
        params = [p for i, p in enumerate(shard.params) if any([flags[i] for flags in gathered])]
        broadcast_from_owners(params, shard, group)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return a copy of the full state on the CPU, in torch's format. All ranks must call this."""
        if self.register_optimizer(optimizer) is None:
            return super().optimizer_state(optimizer)
        shard, channel = self._current_shard(optimizer), self._group()
        local = {i: optimizer.state[p] for i, p in shard.local() if p in optimizer.state}
        gathered: dict[int, Any] = {}
        for src in range(channel.world_size):
            is_src = src == shard.rank
            sent = map_tree(to_placeholder, local) if self.keeps_shards else local
            received = broadcast_tree(sent if is_src else None, channel.collective.members[src], channel)
            if self.keeps_shards:
                gathered.update(local if is_src else received)
                continue
            # One owner at a time: the device may have no memory for the states of all ranks.
            keep = partial(_leaf_to_cpu, copy=is_src) if self.keeps_full else to_placeholder
            gathered.update(map_tree(keep, received))
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({shard.params[i]: gathered[i] for i in sorted(gathered)})
        state.update({key: value for key, value in optimizer.state.items() if key not in shard.owners})
        full: dict[str, Any] = optimizer_view(optimizer, state=state).state_dict()
        return full

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's shard of a full state."""
        self.register_optimizer(optimizer)
        local = state["state"]  # all for a class that overrides load_state_dict: it may keep them elsewhere
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            local = (self._without_others_state(optimizer, state) or state)["state"]
        entries = {**state["state"], **map_tree(read_stored, local)}  # the user's hooks get all entries
        optimizer.load_state_dict({**state, "state": entries})
        if optimizer in self._shards:
            self._shards[optimizer].drop_others_state(optimizer)  # if a class overrides load_state_dict

    def teardown(self) -> None:
        """Remove the hooks of all optimizers, which keep this rank's states; release groups."""
        for shard in self._shards.values():
            for handle in shard.handles:
                handle.remove()
        self._shards.clear()
        self.channel = None
        super().teardown()

    def finish_step(self, optimizer: Optimizer, error: Exception | None = None) -> None:
        """End the running step: broadcast parameters from their owners. All ranks must call this.

        Raises:
            RankError: The step failed on another rank.
            CollectiveMismatch: Parameters have gradients on some ranks only; raised on all of them.
        """
        shard = self._shards.get(optimizer)
        if shard is None or shard.step is None:
            return
        step, shard.step = shard.step, None
        step.write_back(optimizer)
        stepped = [p for p, has_grad in zip(shard.params, step.has_grad, strict=True) if has_grad]
        counts = f"{len(stepped)} of {len(shard.params)} parameters have gradients"
        owners = names_of_owners(shard.params, [replica.module for replica in self._replicas])
        verb = f"optimizer.step of {owners}: {counts} ({zlib.crc32(bytes(step.has_grad)):08x})"
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._stepping = shard
        try:
            texts = gather_objects(text, self._group(), verb)
        finally:
            self._stepping = None
        # Also after an error, so that parameters stay equal on all ranks.
        broadcast_from_owners(stepped, shard, self._group().collective.group)
        shard.writes, shard.before_step = 0, None
        for other in self._shards.values():
            other.changes = other.count()
        ranks = self._group().collective.members
        failed = [f"rank {r} failed in optimizer.step: {t}" for r, t in zip(ranks, texts, strict=True) if t]
        if failed and error is None:
            raise RankError("; ".join(failed))

    def writes(self, optimizer: Optimizer) -> int:
        """Count the in-place changes since the last step; owners' values replace those of other ranks."""
        shard = self._shards.get(optimizer)
        return shard.writes if shard is not None and shard is self._stepping else 0

    def owned_before_step(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Return for each rank the parameters that it owns, as they were before the running step."""
        shard = self._shards.get(optimizer)
        if shard is None or shard is not self._stepping or self.channel is None:
            return []
        owned: list[list[Tensor]] = [[] for _ in range(self.channel.world_size)]
        for parameter in shard.params:
            owned[shard.owners[parameter]].append(parameter)
        owned[shard.rank] = shard.before_step or owned[shard.rank]
        return owned

    def _current_shard(self, optimizer: Optimizer, keeps_states: bool = False) -> OptimizerShard:
        """Return the optimizer's shard; assign owners again if its parameters changed. All ranks must call
        this.

        Args:
            optimizer: A registered one.
            keeps_states: Whether to keep states of others' parameters until the next step: a method beside
                `step` may read what another one wrote, as SAM's second step does.
        """
        shard = self._shards[optimizer]
        params = list(dict.fromkeys(parameters_of(optimizer)))  # each once
        if len(params) != len(shard.params) or any(
            [new is not old for new, old in zip(params, shard.params, strict=True)]
        ):
            self._assign_owners(optimizer, shard, params)
        if not keeps_states:
            shard.drop_others_state(optimizer)
        return shard

    def _assign_owners(self, optimizer: Optimizer, shard: OptimizerShard, params: list[Tensor]) -> None:
        """Assign an owner to each parameter; a rank that alone has its state owns it. All ranks must call
        this.
        """
        channel = self._group()
        sizes = [p.numel() for p in params]
        others = [other.num_elements() for other in self._shards.values() if other is not shard]
        # Parameters without gradients have no states.
        weights = [size if p.requires_grad else 0 for p, size in zip(params, sizes, strict=True)]
        with_state = [i for i, p in enumerate(params) if optimizer.state.get(p)]
        verb = f"setup of {type(optimizer).__name__}: {len(params)} parameters, {sum(sizes)} elements"
        code = zlib.crc32(repr(sizes).encode())
        gathered = gather_objects((weights, sum(others), with_state), channel, f"{verb} ({code:08x})")
        holders: list[list[int]] = [[] for _ in params]
        for rank, (_, _, positions) in enumerate(gathered):
            for i in positions:
                holders[i].append(rank)
        owners = assign_owners(gathered[0][0], [load for _, load, _ in gathered], holders)
        shard.rank, shard.params = channel.collective.rank_in_group, params
        shard.owners = dict(zip(params, owners, strict=True))
        shard.changes = shard.count()

    def _pre_step_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step pre-hook: replace the optimizer by its view. For a view itself (`super().step()`) do
        nothing.
        """
        if optimizer not in self._shards:
            return None
        shard = self._current_shard(optimizer)
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": _evaluated(kwargs["closure"], shard)}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], _evaluated(args[1], shard), *args[2:])
        if replaced := self.replaced_gradients(shard.params):
            shard.replaced += 1
            if not shard.replaced & (shard.replaced - 1):  # a difference would not show in the parameters
                self._compare(replaced, f"{type(optimizer).__name__}.step()")
        for other in self._shards.values():  # several optimizers may have the same parameters
            other.count_writes()
        shard.save_before_step()
        shard.step = step = ShardStep(shard, optimizer)
        return (step.view, *args[1:]), kwargs

    def _post_step_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step post-hook: end the step."""
        self.finish_step(optimizer)

    def _without_others_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Load hook: return the state without entries of other ranks, so that none is copied to the
        device.
        """
        shard = self._shards.get(optimizer)
        ids = [i for group in state["param_groups"] for i in group["params"]]
        params = parameters_of(optimizer)
        if shard is None or len(ids) != len(params):  # torch raises in that case
            return None
        others = {i for i, p in zip(ids, params, strict=True) if not shard.is_local(p)}
        local = {key: value for key, value in state["state"].items() if key not in others}
        return {**state, "state": local}


def _evaluated(closure: Callable[[], Any], shard: OptimizerShard) -> Callable[[], Any]:
    """Call `closure`, before any update; return a function that returns its loss."""
    with torch.enable_grad():
        loss = closure()
    before = shard.versions()

    def evaluated() -> Any:
        if before != shard.versions():
            raise UsageError(
                "The optimizer changed parameters before it called its closure. With sharded states only "
                "this rank's parameters are changed then. Optimizers that evaluate the model in the middle "
                'of a step cannot be sharded: write Fabric(strategy="ddp").'
            )
        return loss

    return evaluated


class CollectiveStep:
    """A step that all ranks end together: an error on one rank is raised on all."""

    def __init__(self, layout: ShardedStates, plan: Callable[..., Any] | None) -> None:
        self.layout = layout
        self.plan = plan

    def __call__(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step, and return the result of the optimizer."""
        try:
            arguments = {} if closure is None else {"closure": closure}
            call = optimizer.step if self.plan is None else partial(self.plan, optimizer)
            return call(**arguments, **kwargs)
        except Exception as error:
            with suppress(CollectiveMismatch, RankError):  # this rank raises its own error
                self.layout.finish_step(optimizer, error)
            raise


def _check_shardable(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose states cannot be sharded."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f'{kind} computes one direction from all parameters, so strategy="zero1" cannot shard its '
            f'states. Write Fabric(strategy="ddp").'
        )
    if couples_parameters(optimizer):
        raise ConfigurationError(
            f"{kind}.step() updates a parameter by values of other parameters (a norm over all, or an "
            "estimate of the learning rate), or by a list of its own with an entry for each. With "
            'strategy="zero1" each rank steps some parameters only. Write Fabric(strategy="ddp") or "zero2", '
            "or keep the list's entries in self.state[p]."
        )
    if any([group.get("differentiable") for group in optimizer.param_groups]):
        raise ConfigurationError(
            f'{kind} has differentiable=True. Parameters that strategy="zero1" receives from other ranks '
            f'have no graph. Leave differentiable out, or write Fabric(strategy="ddp").'
        )


def _leaf_to_cpu(leaf: Any, copy: bool) -> Any:
    return leaf.detach().to("cpu", copy=copy) if isinstance(leaf, torch.Tensor) else leaf
