"""A sequence divided over ranks equals plain torch on the whole: losses, gradients, weights, states."""

from __future__ import annotations

import copy
import gc
import time
import warnings

import pytest
import torch
from machine import ACCELERATOR
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric.strategies import ContextParallel, DDPStrategy, FSDPStrategy, ZeRO1Strategy
from fabric.strategies.context_parallel.sequence import sequence_groups
from fabric.utilities import sequence_positions

VOCABULARY, WIDTH, HEADS, STEPS = 11, 8, 2, 3


class Attention(nn.Module):
    """As people write it, with rotary positions that it makes itself."""

    def __init__(self, causal: bool, groups: int = HEADS) -> None:
        super().__init__()
        self.causal, self.groups = causal, groups
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH * groups // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        positions = sequence_positions(x.shape[1], x.device).to(x.dtype)
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = [
            t.unflatten(-1, (self.groups, -1)).transpose(1, 2) for t in self.key_value(x).chunk(2, -1)
        ]
        turn = torch.stack([(positions / 7).cos(), (positions / 7).sin()], -1).repeat(1, WIDTH // HEADS // 2)
        query, key = query * turn, key * turn
        seen = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=self.groups != HEADS
        )
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a small network."""

    def __init__(self, causal: bool, groups: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal, groups)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.network(self.second(x))


class Net(nn.Module):
    """Embedding and head tied, learned positions, two blocks."""

    def __init__(
        self, causal: bool = True, groups: int = HEADS, recompute: str = "", dropout: float = 0
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(causal, groups, dropout) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(sequence_positions(tokens.shape[1], tokens.device))
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def net(dtype=torch.float64, **settings) -> Net:
    torch.manual_seed(7)
    return Net(**settings).to(dtype)


def data(rows: int, length: int, count: int = STEPS) -> torch.Tensor:
    """(count, rows, 2, length) tokens, the same on every rank."""
    source = torch.Generator().manual_seed(13)
    return torch.randint(0, VOCABULARY, (count, rows, 2, length), generator=source).to(ACCELERATOR)


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, -2).double(), (tokens.flatten() * 3 + 1) % VOCABULARY)


def plain(rows: int, length: int, **settings):
    """Losses and model of one process on the batches of all rows."""
    model = net(**settings).to(ACCELERATOR)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in data(rows, length):
        optimizer.zero_grad()
        loss = loss_of(model, step.flatten(0, 1))
        loss.backward()
        losses.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
    return losses, model


STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "fsdp": FSDPStrategy,
    "zero2": lambda **k: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", **k),
    "fsdp_full": lambda **k: FSDPStrategy(state_dict_type="full", **k),
    "fsdp_recomputed": lambda **k: FSDPStrategy(activation_checkpointing_policy={Block}, **k),
}


def start(name, **part) -> Fabric:
    gc.collect()  # strategies of earlier tests, whose shards have the length of a full sequence here
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=torch.distributed.get_world_size(),
        strategy=STRATEGIES[name](context_parallel=ContextParallel(**part)),
    )
    fabric.launch()
    return fabric


def train(name, part, length, settings):
    """The same loop under a strategy."""
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # in evaluation
    fabric = start(name, **part)
    row, rows = fabric.strategy.data_rank
    model = net(**settings)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    expected, reference = plain(rows, length, **settings)
    for step, (loss, norm) in zip(data(rows, length), expected, strict=True):
        optimizer.zero_grad()
        own = loss_of(model, step[row])
        fabric.backward(own)
        found = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        mean = fabric.all_reduce(own.detach(), reduce_op="mean")
        torch.testing.assert_close([mean.item(), found.item()], [loss, norm], rtol=1e-9, atol=1e-9)
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(step[row]), reference(step[row]), rtol=1e-8, atol=1e-8)
    state = fabric.strategy.get_module_state_dict(model)
    assert state.keys() == reference.state_dict().keys()
    if fabric.global_rank == 0:
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key].cpu(), value.cpu(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("world", "size", "length", "blocks"),
    [
        (2, 2, 16, None),
        pytest.param(2, 2, 13, None, marks=pytest.mark.device),
        (2, 2, 13, {Block}),
        (2, 2, 16, {Attention}),
        (4, 4, 21, None),
        (4, 2, 9, {Block}),
        (4, 4, 6, None),
    ],
)
def test_losses_norms_and_weights_equal_plain_torch(ranks, world, size, length, causal, blocks):
    part = {"size": size, "blocks": blocks}
    ranks.run(train, "ddp", part, length, {"causal": causal}, world_size=world)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ddp"])
@pytest.mark.parametrize(
    "blocks", [None, pytest.param({Block}, marks=pytest.mark.device)], ids=["model", "blocks"]
)
def test_under_every_strategy_that_takes_it(ranks, name, blocks):
    ranks.run(train, name, {"size": 2, "blocks": blocks}, 13, {}, world_size=4)


def in_two_runs(name, path, second):
    """The first step and a save; or what comes after it."""
    fabric = start(name, size=2)
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    if second:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    for step in data(1, 13)[1:] if second else data(1, 13)[:1]:
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step[0]))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})


@pytest.mark.device
@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp_full"])
def test_a_checkpoint_is_that_of_the_whole_model(ranks, tmp_path, name):
    path = str(tmp_path / "saved.pt")
    for second in (False, True):
        ranks.run(in_two_runs, name, path, second, world_size=2)
    state, (_, expected) = torch.load(path, weights_only=True), plain(1, 13)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(state["model"][key].cpu(), value.cpu(), rtol=1e-8, atol=1e-8)
    torch.optim.Adam(expected.parameters()).load_state_dict(state["optimizer"])


@pytest.mark.parametrize("recompute", ["reentrant", "saved"])
@pytest.mark.parametrize("blocks", [None, {Block}, {Attention}], ids=["model", "blocks", "attention"])
def test_activation_checkpointing(ranks, recompute, blocks):
    ranks.run(train, "ddp", {"blocks": blocks}, 13, {"recompute": recompute}, world_size=2)


def former():
    """A reference beside a strategy that is no more, whose shards had the length of its full sequences."""
    fabric = start("ddp")
    model = fabric.setup(net(recompute="saved"))
    model(data(1, 26)[0][0])
    del fabric, model
    deadline = time.monotonic() + 30
    gc.collect()
    while sequence_groups and time.monotonic() < deadline:
        gc.collect()  # a call while another thread collects does nothing
    plain(1, 13, recompute="saved")


def test_shards_of_a_former_strategy_are_forgotten(ranks):
    ranks.run(former, world_size=2)


def test_grouped_queries(ranks):
    ranks.run(train, "ddp", {}, 13, {"groups": 1}, world_size=2)


class Torchs(nn.Module):
    """torch's own encoder layers; `mask` as its users pass it."""

    def __init__(self, mask: str, first: bool) -> None:
        super().__init__()
        self.mask = mask
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x if self.encoder.layers[0].self_attn.batch_first else x.transpose(0, 1)
        length = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, x.device, x.dtype)
        given = {
            "none": {},
            "causal": {"mask": causal, "is_causal": True},
            "mask": {"mask": causal.roll(1, 1).tril()},
            "padding": {"src_key_padding_mask": tokens == 0},
            "both": {"mask": causal.isinf(), "src_key_padding_mask": (tokens == 0) & (tokens.cumsum(1) > 0)},
        }[self.mask]
        return self.encoder(x, **given)


def encode(mask, first, size):
    torch.manual_seed(5)
    reference = Torchs(mask, first).double().to(ACCELERATOR)
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=torch.distributed.get_world_size(),
        strategy=DDPStrategy(
            context_parallel=ContextParallel(
                size,
                blocks={nn.TransformerEncoder},
                seq_dim=1 if first else 0,
                seq_dims={"src_key_padding_mask": 1},
            )
        ),
    )
    fabric.launch()
    model = fabric.setup(copy.deepcopy(reference))
    tokens = torch.randint(0, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(2)).to(ACCELERATOR)
    for mode in ("train", "eval"):
        reference.train(mode == "train"), model.train(mode == "train")
        expected = reference(tokens)
        found = model(tokens)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), reference(tokens), rtol=1e-9, atol=1e-9)
        expected.square().mean().backward()
        fabric.backward(found.square().mean())
        for one, other in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "first",
    [pytest.param(True, marks=pytest.mark.device), False],
    ids=["batch_first", "sequence_first"],
)
@pytest.mark.parametrize("mask", ["none", "causal", "mask", "padding", "both"])
def test_the_layers_of_torch_with_their_masks(ranks, mask, first):
    ranks.run(encode, mask, first, 2, world_size=2)


def single_precision():
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=torch.distributed.get_world_size(),
        strategy=DDPStrategy(context_parallel=ContextParallel()),
    )
    fabric.launch()
    reference = net(torch.float32).to(ACCELERATOR)
    model = fabric.setup(net(torch.float32))
    tokens = data(1, 50)[0, 0]
    expected, found = loss_of(reference, tokens), loss_of(model, tokens)
    expected.backward()
    fabric.backward(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("world", [2, 4])
def test_single_precision_is_exact_to_one_millionth(ranks, world):
    ranks.run(single_precision, world_size=world)


def half_precision():
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=torch.distributed.get_world_size(),
        strategy=DDPStrategy(context_parallel=ContextParallel(blocks={Block})),
        precision="bf16-mixed",
    )
    fabric.launch()
    reference = net(torch.float32).to(ACCELERATOR)
    model = fabric.setup(net(torch.float32))
    tokens = data(1, 33)[0, 0]
    with torch.autocast(ACCELERATOR, torch.bfloat16):
        expected = loss_of(reference, tokens)
    found = loss_of(model, tokens)
    expected.backward()
    fabric.backward(found)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        assert (other.grad - one.grad).norm() <= 0.02 * one.grad.norm()


@pytest.mark.device
def test_mixed_precision_is_that_of_one_process(ranks):
    ranks.run(half_precision, world_size=2)
