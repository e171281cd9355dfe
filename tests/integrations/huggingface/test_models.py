"""Models of transformers under every strategy: each trains what plain torch trains on the joined batch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import BLOCKS, MODELS, batches, by_plan, by_plan_to_compile, staged

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, PipelineStrategy

STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: "zero2",
    "fsdp": lambda: "fsdp",
    "fsdp by blocks": lambda: FSDPStrategy(auto_wrap_policy=BLOCKS),
    "tensor parallel": lambda: ModelParallelStrategy(by_plan, 1, "auto"),
    "tensor parallel x fsdp": lambda: ModelParallelStrategy(by_plan, 2, 2),
    "tensor parallel x fsdp, to compile": lambda: ModelParallelStrategy(by_plan_to_compile, 2, 2),
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
}


def launched(strategy, precision=None):
    devices = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=STRATEGIES[strategy](), precision=precision)
    fabric.launch()
    return fabric


def share(fabric, batch):
    """This rank's rows; ranks of one model have the same."""
    kwargs = fabric.strategy.distributed_sampler_kwargs
    return {key: x[kwargs["rank"] :: kwargs["num_replicas"]] for key, x in batch.items()}


def loss_of(model, batch):
    """The model's own, of its ModelOutput."""
    return model(**batch).loss


def loss_of_logits(model, batch):
    """A pipeline's output is that of its last block."""
    inputs, labels = batch.values()
    logits = model(inputs)
    if logits.ndim == 2:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def adamw(model):
    """With an epsilon above rounding: the keys' bias in attention has a gradient of zero."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def trained(model, optimizer, loss_of, backward, data):
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def plain(name, **more):
    """The oracle: losses and weights of one process."""
    model = MODELS[name](**more)
    losses = trained(model, adamw(model), loss_of, torch.Tensor.backward, batches(name))
    return losses, model.state_dict()


def on_ranks(name, strategy, precision=None, change=None):
    fabric = launched(strategy, precision)
    model = MODELS[name]()
    warnings.filterwarnings("ignore", "The .grad attribute")  # of torch.compile, at a break in a graph
    if change:
        model = change(model)
    if strategy == "pipeline":
        model = staged(model)
    model, optimizer = fabric.setup(model, adamw(model))
    data = [share(fabric, batch) for batch in batches(name)]
    of = loss_of_logits if strategy == "pipeline" else loss_of
    losses = trained(model, optimizer, of, fabric.backward, data)
    return fabric.all_reduce(losses), model.state_dict()


def world(strategy):
    return 4 if " x " in strategy else 2


def has_plan(name, strategy):
    if "compile" in strategy and "tied" in name:  # a head that is split is no embedding that is not
        return False
    return "tensor" not in strategy or bool(MODELS[name]().tp_plan)


CASES = [(name, strategy) for strategy in STRATEGIES for name in MODELS if has_plan(name, strategy)]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_it_trains_what_plain_torch_trains(ranks, name, strategy):
    losses, state = ranks.run(on_ranks, name, strategy, world_size=world(strategy))[0]
    expected_losses, expected = plain(name)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(state), dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_bf16_mixed_is_near(ranks, name, strategy):
    """FSDP2 has embeddings and norms in bfloat16, too, which autocast leaves in float32."""
    losses, state = ranks.run(on_ranks, name, strategy, "bf16-mixed", world_size=world(strategy))[0]
    expected, _ = plain(name)
    assert losses.dtype == torch.float32
    assert {x.dtype for x in state.values()} == {torch.float32}
    assert not torch.equal(losses, expected)
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)


def checkpointing(model, reentrant):
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


def with_checkpoints(model):
    return checkpointing(model, False)


def with_reentrant_checkpoints(model):
    return checkpointing(model, True)


@pytest.mark.parametrize("change", [with_checkpoints, with_reentrant_checkpoints])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_their_switch_for_gradient_checkpointing_changes_no_number(ranks, strategy, change):
    name = "llama" if "tensor" in strategy else "gpt2"
    losses, state = ranks.run(on_ranks, name, strategy, None, change, world_size=world(strategy))[0]
    expected_losses, expected = plain(name)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(state), dict(expected), rtol=1e-4, atol=1e-5)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


def with_compiled_blocks(model):
    torch._dynamo.reset()  # what it has kept of another test's models
    for block in [part for part in model.modules() if isinstance(part, tuple(BLOCKS))]:
        block.compile(backend="aot_eager")
    return model


COMPILED = [
    (name, strategy, change)
    for name, strategy in CASES
    for change, strategies in {
        compiled: ("ddp", "fsdp", "tensor parallel", "tensor parallel x fsdp, to compile"),
        with_compiled_blocks: (
            "ddp",
            "zero1",
            "fsdp by blocks",
            "tensor parallel x fsdp, to compile",
        ),
    }.items()
    if strategy in strategies and name != "tied llama"
]


@pytest.mark.parametrize(("name", "strategy", "change"), COMPILED)
def test_compiled_it_trains_the_same(ranks, name, strategy, change):
    places = world(strategy)
    losses, state = ranks.run(on_ranks, name, strategy, None, change, world_size=places, timeout=400)[0]
    expected_losses, expected = plain(name)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(state), dict(expected), rtol=1e-4, atol=1e-5)
