"""Mends taken back: what the fuzzer must find within minutes, else it looks in the wrong places.

`python tests/fuzz --without NAME` runs programs on ranks in which that mend is undone.
"""

from __future__ import annotations

from typing import NamedTuple


class Mend(NamedTuple):
    """`undone` runs on each rank before a program."""

    undone: str
    layouts: tuple[str, ...] = ()
    """The ones that it is about; none named: all."""
    torch: str = ""
    """What torch, or the package for another cause, says of it, where it is no silent error."""
    kind: str | None = None
    """The row of forms.py that it is about; None: any program."""


DDP = ("ddp", "ddp-unused", "ddp-copies", "zero1")
SPLIT = ("zero2", "zero2-layers", "fsdp", "fsdp-layers", "fsdp-freed")

MENDS = {
    "parts are back after each call": Mend(
        """
from fabric.strategies.sharding.gathered import FSDPCallGuard
def begin(self):
    self._unsharded_for_backward = False
FSDPCallGuard.begin, FSDPCallGuard.end = begin, lambda self: None
""",
        SPLIT,
    ),
    "unsynchronised steps are refused": Mend(
        """
from fabric.strategies.ddp.replicate import Replicate
Replicate.check_synced = lambda *_: None
""",
        DDP,
    ),
    "forgotten optimizers are refused": Mend(
        """
from fabric.strategies.sharding.split import DTensorLayout
DTensorLayout.before_step = lambda *_: None
""",
        SPLIT,
    ),
    "evaluation without gradients meets": Mend(
        """
from fabric.strategies.sharding.forward_check import ForwardCheck
ForwardCheck.check_forward = lambda self, name="": self._within is None
""",
        SPLIT,
    ),
    "standstills end": Mend(
        """
from fabric.guard.deadlocks import DeadlockDetector
DeadlockDetector.detect_deadlock = lambda *_: None
""",
        (*DDP, *SPLIT, "tensor"),
    ),
    "equal numbers are reduced in a tree, too": Mend(
        """
from fabric.guard.control_connections import ControlConnections
made = getattr(ControlConnections._merge, "made", ControlConnections._merge)
def merge(self, control_round):
    if all([row == control_round.message for _, row in self._received.values()]):
        control_round.combine = None
    return made(self, control_round)
merge.made, ControlConnections._merge = made, merge
""",
        ("tree", "fsdp-tree"),
    ),
    "failed passes get a new reducer": Mend(
        """
import fabric.strategies.ddp.replicate as replicate
replicate.renew_reducer = lambda *_: None
""",
        DDP,
    ),
    "an accumulation disarms the reducer": Mend(
        """
import contextlib
from fabric.strategies.ddp.replicate import Replicate
@contextlib.contextmanager
def no_sync(self, wrapped):
    replica = self._replica_of(wrapped)
    with replica.no_sync() if replica is not None else contextlib.nullcontext():
        yield
Replicate.no_sync = no_sync
""",
        ("ddp", "ddp-copies", "zero1"),
    ),
    "own wrappers come off": Mend(
        """
import fabric.setup
fabric.setup.check_module = lambda module, verb, launches: module
""",
        DDP,
    ),
    "streams that share themselves out are found": Mend(
        """
import fabric.data.iterable.stream_source
fabric.data.iterable.stream_source.dataset_shards_itself = lambda name, by_rank: False
"""
    ),
    "the order does not depend on the number of loaders": Mend(
        """
import itertools
import fabric.data.sharding as sharding
count, made = itertools.count(), getattr(sharding.shard_loader, "made", sharding.shard_loader)
def shard_loader(loader, share, seed, *rest, **named):
    return made(loader, share, seed + next(count), *rest, **named)
shard_loader.made, sharding.shard_loader = made, shard_loader
"""
    ),
    "positions in data are for any number of ranks": Mend(
        """
from fabric.data.adapters import IndexSource
begun = getattr(IndexSource.begin, "made", IndexSource.begin)
told = getattr(IndexSource.state, "made", IndexSource.state)
def begin(self, epoch, saved):
    begun(self, epoch, saved and {**saved, "samples": saved["samples"] * self.sampler.rule.shard.world})
def state(self, position):
    at = told(self, position)
    return {**at, "samples": at["samples"] // self.sampler.rule.shard.world}
begin.made, IndexSource.begin = begun, begin
state.made, IndexSource.state = told, state
""",
        ("ddp:", "fsdp:", ":zero1", "single:"),
    ),
    "state dicts of parts are saved whole": Mend(
        """
from fabric.strategies.sharding import dtensors
dtensors._full = lambda tensor, keep: tensor.detach().to_local().clone()
""",
        SPLIT,
    ),
    "LBFGS goes by the mean of its closures' losses": Mend(
        """
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.strategy import Strategy
ParallelStrategy.step_plan = Strategy.step_plan
""",
        DDP[:3],
    ),
    "gradients made by hand are compared": Mend(
        """
from fabric.strategies.ddp.replicate import Replicate
made = getattr(Replicate._keep_local, "made", Replicate._keep_local)
def keep_local(self, known):
    if self._unsynced:
        made(self, known)
keep_local.made, Replicate._keep_local = made, keep_local
""",
        DDP,
    ),
    "recomputed blocks run to their end": Mend(
        """
import contextlib
import torch.utils.checkpoint
import fabric.strategies.fsdp.fully_shard as fully_shard
early = lambda enabled: contextlib.nullcontext()
torch.utils.checkpoint.set_checkpoint_early_stop = fully_shard.set_checkpoint_early_stop = early
""",
        ("fsdp-checkpointed", "pipeline", "pipeline-rows"),
    ),
    "gradient penalties on split models are refused": Mend(
        """
from fabric.strategies.sharding.gathered import FSDPCallGuard
FSDPCallGuard.reached = lambda self, grad: self.restore_unsharded()
""",
        SPLIT,
        "setStorage",
    ),
    "torch's static graphs are left out": Mend(
        """
import functools
import torch.nn.parallel as parallel
made = getattr(parallel.DistributedDataParallel, "func", parallel.DistributedDataParallel)
parallel.DistributedDataParallel = functools.partial(made, static_graph=True)
""",
        ("ddp-static",),
    ),
    "gradients that are left come to the new scale": Mend(
        """
from fabric.precision.loss_scale import LossScale
def update(self):
    if self._unscaled_ids:
        self.scaler.update()
        self._unscaled_ids.clear()
        self._unscaled.clear()
LossScale.update = update
""",
        ("single-scaled", "ddp-scaled", "zero1-scaled", "fsdp-layers-scaled"),
    ),
    "activations are not computed again with other weights": Mend(
        """
from fabric.strategies.pipeline import stage
stage._version = lambda parameter: (0, 0)
""",
        ("pipeline", "pipeline-rows"),
    ),
    "evaluations are of the same weights": Mend(
        """
from fabric.collectives.channel import Channel
made = getattr(Channel.check_barrier, "made", Channel.check_barrier)
without = lambda self, verb, what="": made(self, verb, "")
without.made, Channel.check_barrier = made, without
""",
        SPLIT,
    ),
    "forgotten optimizers of forgotten models are found": Mend(
        """
from fabric.precision.loss_scale import LossScale
LossScale._is_never_set_up = lambda *_: False
""",
        ("single-scaled", "ddp-scaled", "context-scaled"),
    ),
    "closures that train forgotten models are refused": Mend(
        """
from fabric.strategies.free import StepCheck
StepCheck.after_step = lambda *_: None
""",
        DDP,
    ),
    "replicas are compared": Mend(
        """
from fabric.replicas.check import ReplicaCheck
ReplicaCheck.facts = lambda self: bytes(16)
ReplicaCheck.compare = lambda *_, **__: None
""",
        ("ddp", "ddp-copies"),
    ),
    "thawed groups know their dtypes": Mend(
        """
import fabric.strategies.sharding.sharded as sharded
sharded.set_frozen_group_dtypes = lambda root: None
""",
        ("zero2-layers", "fsdp-layers", "fsdp-freed", "mesh"),
        "attempting to assign a gradient with dtype",
    ),
    "what two models share is reduced by itself": Mend(
        """
from fabric.strategies.ddp.replicate import Replicate
Replicate._separate_shared = lambda *_: None
""",
        ("ddp", "ddp-copies", "zero1"),
        "parameters of Agent got no gradient",
    ),
    "gradients of parameters of no model are averaged": Mend(
        """
from fabric.strategies.free import FreeParameters
FreeParameters.around_pass = lambda self, run, *args, **kwargs: run(*args, **kwargs)
""",
        (*DDP, *SPLIT),
    ),
    "modules with hidden outputs stay gathered": Mend(
        """
from fabric.strategies.sharding.gathered import FSDPCallGuard
class Everything(dict):
    __contains__ = lambda self, state: True
made = getattr(FSDPCallGuard.__init__, "made", FSDPCallGuard.__init__)
def begin(self, *args):
    made(self, *args)
    self._hidden = Everything()
begin.made, FSDPCallGuard.__init__ = made, begin
""",
        SPLIT,
        "a tensor that a forward stored",
    ),
    "gradients with other memory are sent": Mend(
        """
from fabric.strategies.ddp.replica_state import ReplicaState
ReplicaState.restore_views = lambda self: None
""",
        ("ddp", "ddp-unused", "zero1"),
    ),
    "other memory for split parameters is refused": Mend(
        """
import torch
import fabric.strategies.sharding.dtensors as dtensors
dtensors._set_data = lambda tensor, value: torch.Tensor.data.__set__(tensor, value)
""",
        SPLIT,
    ),
    "a strategy of some ranks stays among them": Mend(
        """
import fabric.strategies.parallel as parallel
made = getattr(parallel.TorchCollective, "func", parallel.TorchCollective)
def whole(group=None):
    return made()
whole.func, parallel.TorchCollective = made, whole
""",
        ("ddp-group", "zero1-group"),
    ),
    "models in another order are named": Mend(
        """
import fabric.strategies.ddp.replicate as replicate
import fabric.strategies.sharding.forward_check as forward_check
replicate.name_of = forward_check.name_of = lambda module: "a model"
""",
        (*DDP, *SPLIT),
    ),
    "torch's clip of scaled gradients is refused": Mend(
        """
from fabric.precision.loss_scale import LossScale
LossScale.before_clip = lambda self, gradients: None
""",
        ("single-scaled", "ddp-scaled", "zero1-scaled", "fsdp-layers-scaled"),
    ),
    "buffers are sent by name": Mend(
        """
import fabric.strategies.buffers as buffers
buffers.sorted = lambda names, reverse=False: list(names)[:: -1 if reverse else 1]
""",
        (*DDP, *SPLIT),
    ),
    "a forward that writes split parameters is refused": Mend(
        """
import fabric.strategies.sharding.sharded as sharded
sharded.check_first_forward = lambda root: None
""",
        SPLIT,
    ),
    "gradients of torch.autograd.grad are compared at the step": Mend(
        """
from fabric.strategies.ddp.replicate import Replicate
del Replicate.after_grad
""",
        DDP,
    ),
}
