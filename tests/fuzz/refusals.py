"""What the README, or torch, refuses: a pattern of the error's text, and why it is owed.

A run fails for an error that matches none of these: either it is owed and gets its line here, or fabric
refuses too much.
"""

from __future__ import annotations

import re

OWED = [
    (r"were never synchronised", "a step whose gradients were all made under no_backward_sync"),
    (r"got no gradient in this backward", "DDP and a forward that leaves parameters out"),
    (r"was frozen at fabric\.setup and requires a gradient now", "a part that is thawed after setup"),
    (r"got the gradient of .* twice in one backward", "reentrant checkpoints under DDP"),
    (r"was called where it leaves the gradients", "loss.backward() that fabric did not arm"),
    (r"setup removed from the model", "an optimizer that was forgotten in setup"),
    (r"auto_wrap_policy=.* matches no module", "a policy that names classes the model has not"),
    (r"run the same layers on all ranks", "layers that only some ranks used"),
    (r"Ranks must use models and optimizers in one order", "models in another order on ranks"),
    (r"CollectiveMismatch: Ranks made different calls", "a forward, or a verb, of some ranks alone"),
    (r"is a view with gaps, or transposed", "parameters with gaps in memory of sharded models"),
    (r"CheckpointError", "a part that is frozen between the forward and its computing again"),
    (r"DistributedDataParallel|a DDP of your own", "a DDP of the user's own"),
    (r"share the same data|is a collective", "evaluation on one rank of a row"),
    (r"no_backward_sync needs a model that is set up", "no_backward_sync of a model that is not set up"),
    (r"computes .*with a tensor that is split over ranks", "reading split parameters, unmarked methods"),
    (r"A compiled model cannot be cut into stages", "a pipeline of a compiled model"),
    (r"has only this .* of the states", "the raw optimizer's state_dict under zero1 and in a pipeline"),
    (r"would be lost: the first stage of the pipeline", "saving what one stage has of a model"),
    (r"no_grad\S* #\d+ with different data", "ranks of one model that evaluate other batches"),
    (r"must read the same data", "a stream that shares itself out among ranks of one model"),
    (r"LBFGS (joins|computes)", "LBFGS on split parameters or states"),
    (r"or by a list of its own with an entry for each", "zero1: values of other parameters in a step"),
    (r"create_graph=True\)? (went through|is not supported)", "a graph of gradients where none can be"),
    (r"torch\.autograd\.grad, or backward\(inputs", "torch.autograd.grad through a pipeline"),
    (r"of a model in a pipeline: the graph of a loss has no path", "torch.autograd.grad in a pipeline"),
    (r"which is a shard: the forward used a gathered copy", "torch.autograd.grad of sharded parameters"),
    (r"has sparse=True, and a sharded model cannot", "sparse embeddings of sharded models"),
    (r"a penalty on weights", "a term of split parameters in the loss"),
    (r"which is on stage \d+ of the pipeline", "a state dict of some stages in a file"),
    (r"was changed between the forward and the backward", "weights replaced before a pipeline's backward"),
    (r"forward without gradients .* with different data", "weights changed between unequal evaluations"),
    (r"is that of an optimizer which was not set up", "scaled gradients, by an optimizer that was forgotten"),
    (r"\.data = \.\.\. would change nothing", "other memory for split parameters"),
    (r"In the forward this is a gathered copy", "a forward that writes split parameters"),
    (r"register_hook: .* is split over ranks", "a tensor hook on split parameters"),
    (r"was moved or converted", "a model that was converted after setup"),
    (r"which was not set up: its gradients are not averaged", "a model that was never set up"),
    (r"carry the loss scale", "torch's clip of scaled gradients"),
    (r"Ranks called clip_gradients .* with different data", "another limit of gradients on each rank"),
    (r"ReplicasDivergedError: ", "replicas that a statement made different"),
    (r"from before fabric\.setup was used", "parameters that setup replaced by their shards"),
    (r"clip_gradients got \w+ and an optimizer of another model", "a clip by the optimizer of another model"),
    (r"is not finite", "clip_gradients of gradients that are not finite"),
    # Of engines, which programs meet by --layout only.
    (r"makes its engine of a model and its optimizer together", "DeepSpeed: an optimizer without its model"),
    (r"comes from no model that was set up with an optimizer", "DeepSpeed: a loss of no engine"),
    (r"has one optimizer, but fabric\.setup got", "DeepSpeed: two optimizers of one model"),
    (r"There was no optimizer\.zero_grad\(\) since the last", "DeepSpeed: gradients that stay over a step"),
    (r"DeepSpeed writes its directories whole and at once", "DeepSpeed: beside the loop, or filtered"),
    (r"a directory of DeepSpeed's takes one model", "DeepSpeed: two models in a directory"),
    (r"came after gradients were clipped or divided", "DeepSpeed: more gradients after clipping"),
    (r"retain_graph=True\): under stage 3", "DeepSpeed: two backwards of one graph in stage 3"),
    (r"A backward before this one failed in the middle", "DeepSpeed: after a backward that failed"),
    (r"gives wrong gradients: this strategy", "DeepSpeed: loss.backward()"),
    (r"A group of the optimizer has no parameter that requires", "DeepSpeed: a frozen group"),
    (r"engine steps what it took in then", "DeepSpeed: a part that is frozen or thawed after setup"),
    (r"DeepSpeed takes no parameter of shape", "DeepSpeed: 0-dim parameters, or with gaps"),
    (r"a DeepSpeed engine has the parameters of setup", "DeepSpeed: add_param_group"),
    (r"after zero_grad\(set_to_none=False\) and no backward", "DeepSpeed: a step with zeros"),
    (r"Parameters were written by hand, and under stage 3", "DeepSpeed: weights written by hand in stage 3"),
    (r"The state dict of a bare \w+ has no values under stage 3", "DeepSpeed: a bare state dict in stage 3"),
    (r"DeepSpeed has no gradients of others", "DeepSpeed: clipping what is not trained"),
]  # fmt: skip


def reason(text: str) -> str | None:
    """Why this error is owed; None: nobody has said so."""
    return next((why for pattern, why in OWED if re.search(pattern, text)), None)


def brief(text: str) -> str:
    """An error without what differs from program to program."""
    line = text.split(": ", 1)[-1].splitlines()[0]
    line = re.sub(r"\d+", "N", line)
    return line[:110]
