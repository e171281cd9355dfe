"""`ShardedStates`: as `Replicate`, but each rank steps only its share of the parameters and holds the states
of those; after the step its owner sends each parameter to the other ranks (ZeRO stage 1).
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

from fabric.checkpoint.portable import elsewhere, read_stored
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
    optimizer_view,
    send,
)
from fabric.utilities.init import names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


class ShardedStates(Replicate):
    """Parameters and gradients on every rank, optimizer states on one rank each.

    The user's optimizer stays what it is. In its step, torch's own hooks put a stand-in for it in place: of
    the same class, with the same state, whose groups have this rank's parameters only. The optimizer and the
    gradients are so never changed, and neither a closure nor an error inside the step can leave them changed.

    Args:
        settings: As in `Replicate`.
    """

    traits = replace(Replicate.traits, splits_optimizers=True, replicates=("parameters", "buffers"))

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._shares: weakref.WeakKeyDictionary[Optimizer, OptimizerShard] = weakref.WeakKeyDictionary()
        self._stepping: OptimizerShard | None = None
        """Of the step whose parameters are about to be sent."""

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer, which steps this rank's share. All ranks must call this.

        Raises:
            ConfigurationError: Its states cannot lie on several ranks.
        """
        optimizer = super().setup_optimizer(optimizer)
        if self.attend(optimizer) is not None:
            self._current(optimizer)
        return optimizer

    def attend(self, optimizer: Optimizer) -> OptimizerShard | None:
        """Hook into an optimizer's step, once; None where there is one rank. No communication."""
        if self.channel is None or self.channel.world_size == 1:
            return None
        share = self._shares.get(optimizer)
        if share is None:
            _check_divisible(optimizer)
            compiled = getattr(optimizer.__dict__.get("step"), UNCOMPILED, None)
            if compiled is not None:
                optimizer.step = compiled  # type: ignore[method-assign]
            share = self._shares[optimizer] = OptimizerShard()
            first = optimizer.register_step_post_hook(self._after)
            # Before those of the user, which must see what all ranks have.
            first.hooks_dict_ref().move_to_end(first.id, last=False)  # type: ignore[union-attr]
            share.handles = [
                first,
                optimizer.register_step_pre_hook(self._before),
                RejectPartialStateDict(optimizer, "this rank's share").handle,
                optimizer.register_load_state_dict_pre_hook(self._keep_own_state),
            ]
        return share

    def joint_step(self, optimizer: Optimizer, plan: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """`plan` (None: the optimizer's own step) such that a failure on one rank is one on all.

        Also where a copied or unpickled optimizer, which has lost its hooks, gets them back.
        """
        if self.attend(optimizer) is None:
            return plan
        step: Callable[..., Any] = torch.compiler.disable(JointStep(self, plan))  # no compiler sees messages
        return step

    def optimizer_method(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method; after it all ranks have the values that the owners of parameters gave them."""
        if self.attend(optimizer) is None:
            return method

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            params = self._current(optimizer).params
            before = [(p._version, p.data_ptr()) for p in params]
            result = method(*args, **kwargs)
            changed = [now != (p._version, p.data_ptr()) for now, p in zip(before, params, strict=True)]
            if any(changed):
                self._send_changed(optimizer, method.__name__, changed)
            return result

        return run

    def _send_changed(self, optimizer: Optimizer, name: str, changed: list[bool]) -> None:
        share, group = self._shares[optimizer], self._group().collective.group
        told = gather_objects(
            changed, self._group(), f"{type(optimizer).__name__}.{name}, which changed parameters"
        )
        send([p for i, p in enumerate(share.params) if any([flags[i] for flags in told])], share, group)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """A copy of the full state as torch writes it, in host memory. All ranks must call this."""
        if self.attend(optimizer) is None:
            return super().optimizer_state(optimizer)
        share, channel = self._current(optimizer), self._group()
        mine = {i: optimizer.state[p] for i, p in share.own() if p in optimizer.state}
        gathered: dict[int, Any] = {}
        for src in range(channel.world_size):
            own = src == share.rank
            sent = map_tree(elsewhere, mine) if self.keeps_shards else mine
            part = broadcast_tree(sent if own else None, channel.collective.members[src], channel)
            if self.keeps_shards:
                gathered.update(mine if own else part)
                continue
            # One owner's tensors at a time: all of them on the device is what this layout is there to avoid.
            gathered.update(map_tree(partial(_on_host, copy=own) if self.keeps_full else elsewhere, part))
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({share.params[i]: gathered[i] for i in sorted(gathered)})
        state.update({key: value for key, value in optimizer.state.items() if key not in share.owners})
        full: dict[str, Any] = optimizer_view(optimizer, state=state).state_dict()
        return full

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's share of a full state."""
        self.attend(optimizer)
        own = (self._keep_own_state(optimizer, state) or state)["state"]
        entries = {**state["state"], **map_tree(read_stored, own)}  # the user's hooks see all of them
        optimizer.load_state_dict({**state, "state": entries})
        if optimizer in self._shares:
            self._shares[optimizer].drop_foreign(optimizer)  # of classes that load in a way of their own

    def teardown(self) -> None:
        """Let go of groups, and of optimizers: they are plain again, with this rank's states."""
        for share in self._shares.values():
            for handle in share.handles:
                handle.remove()
        self._shares.clear()
        self.channel = None
        super().teardown()

    def finish(self, optimizer: Optimizer, error: Exception | None = None) -> None:
        """End a step that this rank is in: send and receive parameters. All ranks must come here.

        Raises:
            RankError: The step failed on another rank.
            CollectiveMismatch: Gradients are there on some ranks only; raised on all of them.
        """
        share = self._shares.get(optimizer)
        if share is None or share.step is None:
            return
        step, share.step = share.step, None
        step.give_back(optimizer)
        stepped = [p for p, there in zip(share.params, step.with_gradient, strict=True) if there]
        told = f"{len(stepped)} of {len(share.params)} parameters have gradients"
        owners = names_of_owners(share.params, [replica.module for replica in self._replicas])
        verb = f"optimizer.step of {owners}: {told} ({zlib.crc32(bytes(step.with_gradient)):08x})"
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._stepping = share
        try:
            texts = gather_objects(said, self._group(), verb)
        finally:
            self._stepping = None
        # Also after a failure: the ranks' parameters stay equal, whatever was stepped before it.
        send(stepped, share, self._group().collective.group)
        share.writes, share.kept = 0, None
        for other in self._shares.values():
            other.changes = other.count()
        ranks = self._group().collective.members
        failed = [f"rank {r} failed in optimizer.step: {t}" for r, t in zip(ranks, texts, strict=True) if t]
        if failed and error is None:
            raise RankError("; ".join(failed))

    def writes(self, optimizer: Optimizer, settle: bool = False) -> int:
        """Count the in-place changes since the last step; values of owners replace those of other ranks."""
        share = self._shares.get(optimizer)
        return share.writes if share is not None and share is self._stepping else 0

    def owned_before_step(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Return by rank the parameters that it owns, as they were before the step in progress."""
        share = self._shares.get(optimizer)
        if share is None or share is not self._stepping or self.channel is None:
            return []
        parts: list[list[Tensor]] = [[] for _ in range(self.channel.world_size)]
        for parameter in share.params:
            parts[share.owners[parameter]].append(parameter)
        parts[share.rank] = share.kept or parts[share.rank]
        return parts

    def _current(self, optimizer: Optimizer) -> OptimizerShard:
        """The optimizer's share, divided anew if its parameters have changed. All ranks must call this."""
        share = self._shares[optimizer]
        params = list(dict.fromkeys(parameters_of(optimizer)))  # each once
        if len(params) != len(share.params) or any(
            [new is not old for new, old in zip(params, share.params, strict=True)]
        ):
            self._divide(optimizer, share, params)
        share.drop_foreign(optimizer)
        return share

    def _divide(self, optimizer: Optimizer, share: OptimizerShard, params: list[Tensor]) -> None:
        """Agree on who owns what. A state that one rank alone holds stays there: nothing is moved."""
        channel = self._group()
        sizes = [p.numel() for p in params]
        others = [other.load() for other in self._shares.values() if other is not share]
        # What has no gradients gets no states, either.
        weights = [size if p.requires_grad else 0 for p, size in zip(params, sizes, strict=True)]
        held = [i for i, p in enumerate(params) if optimizer.state.get(p)]
        verb = f"setup of {type(optimizer).__name__}: {len(params)} parameters, {sum(sizes)} elements"
        code = zlib.crc32(repr(sizes).encode())
        told = gather_objects((weights, sum(others), held), channel, f"{verb} ({code:08x})")
        holders: list[list[int]] = [[] for _ in params]
        for rank, (_, _, positions) in enumerate(told):
            for i in positions:
                holders[i].append(rank)
        owners = assign_owners(told[0][0], [load for _, load, _ in told], holders)
        share.rank, share.params = channel.collective.rank_in_group, params
        share.owners = dict(zip(params, owners, strict=True))
        share.changes = share.count()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step pre-hook: the stand-in steps. One that steps itself (`super().step()`) is left alone."""
        if optimizer not in self._shares:
            return None
        share = self._current(optimizer)
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": _called(kwargs["closure"], share)}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], _called(args[1], share), *args[2:])
        for other in self._shares.values():  # which may hold the same parameters
            other.count_writes()
        share.keep_written()
        share.step = step = ShardStep(share, optimizer)
        return (step.stand_in, *args[1:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step post-hook."""
        self.finish(optimizer)

    def _keep_own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Load hook: without what other ranks own, so that it never gets memory on this device."""
        share = self._shares.get(optimizer)
        ids = [i for group in state["param_groups"] for i in group["params"]]
        params = parameters_of(optimizer)
        if share is None or len(ids) != len(params):  # torch raises in that case
            return None
        foreign = {i for i, p in zip(ids, params, strict=True) if not share.is_own(p)}
        kept = {key: value for key, value in state["state"].items() if key not in foreign}
        return {**state, "state": kept}


def _called(closure: Callable[[], Any], share: OptimizerShard) -> Callable[[], Any]:
    """A closure that was called, on all ranks and before any update; the step asks for its loss."""
    with torch.enable_grad():
        loss = closure()
    before = share.versions()

    def again() -> Any:
        if before != share.versions():
            raise UsageError(
                "The optimizer changed parameters before it called its closure, which would see those of "
                "this rank's share changed and the others not. Optimizers that evaluate the model in the "
                'middle of a step cannot be sharded: write Fabric(strategy="ddp").'
            )
        return loss

    return again


class JointStep:
    """A step that all ranks end together: one on which it raises still meets the others, which then raise."""

    def __init__(self, layout: ShardedStates, plan: Callable[..., Any] | None) -> None:
        self.layout = layout
        self.plan = plan

    def __call__(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step; what the optimizer returns."""
        try:
            given = {} if closure is None else {"closure": closure}
            call = optimizer.step if self.plan is None else partial(self.plan, optimizer)
            return call(**given, **kwargs)
        except Exception as error:
            with suppress(CollectiveMismatch, RankError):  # what went wrong here comes first
                self.layout.finish(optimizer, error)
            raise


def _check_divisible(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose states cannot lie on several ranks."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f'{kind} computes one direction from all parameters, so strategy="zero1" cannot divide them over '
            f'ranks. Write Fabric(strategy="ddp").'
        )
    if couples_parameters(optimizer):
        raise ConfigurationError(
            f"{kind}.step() updates a parameter by values of other parameters (a norm over all, or an "
            'estimate of the learning rate), and with strategy="zero1" each rank steps some of them only. '
            'Write Fabric(strategy="ddp"), or "zero2".'
        )
    if any([group.get("differentiable") for group in optimizer.param_groups]):
        raise ConfigurationError(
            f'{kind}(differentiable=True): autograd cannot follow parameters that strategy="zero1" receives '
            f'from other ranks. Leave differentiable out, or write Fabric(strategy="ddp").'
        )


def _on_host(leaf: Any, copy: bool) -> Any:
    return leaf.detach().to("cpu", copy=copy) if isinstance(leaf, torch.Tensor) else leaf
