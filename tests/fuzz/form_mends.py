"""Mends of what `forms.py` shows, taken back, as in `mends.py`: found within 10 programs of their kind."""

from __future__ import annotations

import inspect
import textwrap

from mends import DDP, SPLIT, Mend


def rewrite(owner: object, name: str, old: str, new: str = "") -> None:
    """Replace text in a function of the package, once in each process."""
    function = getattr(owner, name)
    if function.__code__.co_filename == "undone":
        return
    source = textwrap.dedent(inspect.getsource(function))
    if old not in source:
        raise ValueError(f"{name} has no text {old!r}.")
    names: dict[str, object] = {}
    exec(compile(source.replace(old, new), "undone", "exec"), function.__globals__, names)
    setattr(owner, name, names[name])


FORM_MENDS = {
    "means over unequal numbers of labels are warned of": Mend(
        """
import fabric.loss_check.compare as compare
compare._compare_rows = lambda *_, **__: None
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="labels",
    ),
    "gradients through reductions in place are warned of": Mend(
        """
from fabric.loss_check.check import LossCheck
LossCheck.reducing = lambda *_: None
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="reduced",
    ),
    "torch.autograd.grad is reported by any name": Mend(
        """
import torch
import fabric.core.backward_listeners as listeners
def after_grads(call):
    grad = torch.autograd.grad
    def reported(outputs, inputs, *args, **kwargs):
        inputs = inputs if isinstance(inputs, (dict, torch.Tensor)) else tuple(inputs)
        grads = grad(outputs, inputs, *args, **kwargs)
        call([inputs] if isinstance(inputs, torch.Tensor) else [*inputs], grads)
        return grads
    torch.autograd.grad = reported
if listeners.after_grads.__name__ != "undone":
    listeners.after_grads, after_grads.__name__ = after_grads, "undone"
""",
        ("ddp", "ddp-copies", "zero1"),
        kind="grad",
    ),
    "compiled steps run listeners uncompiled": Mend(
        """
from form_mends import rewrite
import fabric.core.backward_listeners as listeners
rewrite(listeners, "_with_listeners", "if torch.compiler.is_compiling()", "if False")
rewrite(listeners, "_before_step", "if torch.compiler.is_compiling()", "if False")
""",
        (*DDP, *SPLIT),
        "",
        "compiled",
    ),
    "sparse embeddings of sharded models are refused": Mend(
        """
from form_mends import rewrite
from fabric.strategies.fsdp.fully_shard import FullyShard
rewrite(FullyShard, "_check_parameters", "weight is not None and", "False and")
""",
        SPLIT,
        "parse",
        "sparse",
    ),
    "losses of recurrent numbers are not followed to their end": Mend(
        """
from form_mends import rewrite
import fabric.loss_check.terms as terms
terms._MAX_DEPTH = 10**6
""",
        ("ddp", "zero1", "fsdp"),
        kind="terms",
    ),
    "a rank with a term of its own is not compared": Mend(
        """
from form_mends import rewrite
import fabric.loss_check.compare as compare
rewrite(compare, "_weights_of", "and len({of_rank.terms[index] for of_rank in by_rank}) == 1")
""",
        ("ddp", "zero1", "fsdp"),
        kind="terms",
    ),
    "parameters that were frozen at setup are refused later": Mend(
        """
from form_mends import rewrite
from fabric.strategies.ddp.replicate import Replicate
rewrite(Replicate, "around_pass", "p is not None and p.requires_grad]", "False]")
""",
        ("ddp", "ddp-copies", "zero1"),
        kind="unfrozen",
    ),
    "a short last batch is warned of": Mend(
        """
import fabric.loss_check.check as check
check.warn_of_last_batch = lambda *_: None
""",
        ("ddp", "zero1", "fsdp"),
        kind="batches",
    ),
    "losses that compare rows with other rows are warned of": Mend(
        """
import fabric.loss_check.nonlinear as nonlinear
nonlinear._is_between_rows = lambda done: False
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="rows",
    ),
    "losses that are no mean over rows are warned of": Mend(
        """
import fabric.loss_check.nonlinear as nonlinear
nonlinear._kind = lambda done: ""
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="rows",
    ),
    "numbers that were reduced in place are watched": Mend(
        """
import fabric.loss_check.in_place as in_place
in_place.ReducedNumber.warn = lambda self, grad: None
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="reduced",
    ),
    "gradients of means in place are compared": Mend(
        """
import fabric.loss_check.compare as compare
compare.compare_mean_gradients = lambda by_rank: None
""",
        ("ddp", "zero1", "fsdp", "zero2"),
        kind="reduced",
    ),
    "what a loop makes of its gradients is compared, too": Mend(
        """
from form_mends import rewrite
from fabric.strategies.ddp.replica_state import ReplicaState
rewrite(ReplicaState, "is_unsynced", "any(made) or")
""",
        ("ddp", "ddp-copies", "zero1"),
        kind="grad",
    ),
    "torch.autograd.grad of shards is refused": Mend(
        """
from fabric.strategies.sharding.sharded import FSDP2Runtime
FSDP2Runtime.after_grad = lambda *_: None
""",
        SPLIT,
        "not have been used in the graph",
        "grad",
    ),
    "the first rank of a process group warns": Mend(
        """
from fabric.utilities.rank_zero import rank_zero_only
always_zero = property(lambda self: 0, lambda self, rank: None)
rank_zero_only.warning_rank
setattr(type(rank_zero_only), "warning_rank", always_zero)
""",
        ("ddp-group", "zero1-group"),
        kind="batches",
    ),
    "what FSDP reduces is compared": Mend(
        """
import fabric.strategies.sharding.sharded as sharded
sharded.record_reductions = lambda *_: None
""",
        SPLIT,
        kind="branches",
    ),
    "layers are compared whose order is new": Mend(
        """
from fabric.strategies.sharding.forward_check import CallOrder
CallOrder.differs = lambda *_: False
""",
        SPLIT,
        kind="branches",
    ),
    "steps with a closure are compared": Mend(
        """
from form_mends import rewrite
from fabric.strategies.sharding.sharded import FSDP2Runtime
rewrite(FSDP2Runtime, "before_step", 'text = "a closure computes the gradients"', "return")
""",
        SPLIT,
    ),
    "steps of shared parameters are compared": Mend(
        """
from fabric.replicas.check import ReplicaCheck
ReplicaCheck._is_shared = lambda self, module: False
""",
        ("ddp", "zero1"),
    ),
    "optimizers with lists of their own are refused": Mend(
        """
import fabric.strategies.zero1.joint as joint
joint._own_tensors = lambda optimizer: []
""",
        ("zero1",),
        kind="lists",
    ),
    "losses of methods are known where parameters are split": Mend(
        """
from form_mends import rewrite
from fabric.loss_check.record import FirstCalls
rewrite(FirstCalls, "record_outputs", "steps.splits_parameters or not plain", "not plain")
""",
        SPLIT,
        kind="methods",
    ),
    "threads that read loaders send no messages": Mend(
        """
from form_mends import rewrite
from fabric.data.loader import _FabricDataLoader
rewrite(_FabricDataLoader, "_consistency_key", "if threading.get_ident() == self._thread else None")
""",
        ("ddp", "zero1", "fsdp"),
        kind="ahead",
    ),
}
