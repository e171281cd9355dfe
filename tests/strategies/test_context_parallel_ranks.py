"""What ContextParallel refuses, on all ranks, and what stays as it is: random numbers, copies, loaders."""

from __future__ import annotations

import copy
import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, UsageError
from fabric.strategies import ContextParallel, DDP2Strategy, DDPStrategy
from fabric.strategies.context_parallel.exchange import SequenceExchange
from fabric.strategies.context_parallel.sequence import current_shard
from fabric.utilities import sequence_positions


def launched(*args, strategy=DDPStrategy, **part) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(context_parallel=ContextParallel(*args, **part)),
    )
    fabric.launch()
    return fabric


def assert_left():
    assert current_shard() is None
    assert not _get_current_function_mode_stack()


def assert_same_gradients(model, plain):
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


class Attend(nn.Module):
    """Self-attention with one head."""

    def __init__(self, how: str = "causal") -> None:
        super().__init__()
        self.how = how
        self.project = nn.Linear(4, 12)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, extra=None):
        query, key, value = self.project(x).chunk(3, -1)
        length, how = x.shape[1], self.how
        if how == "by hand":
            return (query @ key.mT).softmax(-1) @ value
        if how == "counts":
            return F.scaled_dot_product_attention(query, key, value) + torch.arange(length)[:, None]
        if how == "mean":
            return x - x.mean(1, keepdim=True)
        if how == "mask inside":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if how == "elsewhere":
            return F.scaled_dot_product_attention(query, extra, extra)
        if how == "added":
            return x + extra
        if how == "scalar":
            return F.scaled_dot_product_attention(query, key, value).mean()
        if how == "dropout":
            return self.drop(x)
        if how == "fails":
            raise ValueError("on purpose")
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Fourfold(nn.Module):
    """Whole outside, divided in one module."""

    def __init__(self, how: str = "causal") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Attend(how)

    def forward(self, x, *extra):
        return self.inner(self.first(x), *extra)


REFUSED = {
    "by hand": "attention written by hand",
    "counts": "sequence_positions(length)",
    "mean": "a mean over the sequence",
    "mask inside": "Write is_causal=True, or pass the mask of the full sequence (12 x 12)",
    "elsewhere": "supports self-attention over one sequence",
    "added": "ContextParallel(seq_dims={'name': dim})",
    "scalar": "reduce it after the model",
}


def refused(how, extra):
    fabric = launched(blocks={Attend})
    torch.manual_seed(3)
    model = fabric.setup(Fourfold(how))
    for _ in range(2):  # and again, not only the first time
        try:
            model(
                (torch.ones(2, 24, 4).cumsum(1) / 7).exp().sin(),
                *([] if extra is None else [torch.randn(extra)]),
            )
        except UsageError as error:
            text = str(error)
        else:
            text = "nothing"
        assert_left()
    return text


@pytest.mark.parametrize("how", REFUSED)
def test_what_looks_along_the_sequence_otherwise_is_refused_on_all_ranks(ranks, how):
    extra = {"elsewhere": (2, 5, 4), "added": (24, 4)}.get(how)
    texts = ranks.run(refused, how, extra, world_size=2)
    assert all([REFUSED[how] in text for text in texts]), texts
    assert all(["inner" in text or "position" in text for text in texts])


def without_sequence():
    fabric = launched()
    fabric.setup(nn.Linear(4, 4))(torch.ones(4))


def with_batch_norm():
    fabric = launched()
    fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def where_blocks_match_nothing():
    launched(blocks={nn.LSTM}).setup(Fourfold())


def with_gradients_by_frequency():
    launched().setup(nn.Sequential(nn.Embedding(3, 4, scale_grad_by_freq=True), Attend()))


def with_a_nested_tensor():
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    fabric = launched(blocks={nn.TransformerEncoderLayer})
    model = fabric.setup(nn.TransformerEncoder(layer, 1)).eval()
    with torch.no_grad():
        model(torch.ones(2, 8, 4), src_key_padding_mask=torch.arange(8).expand(2, 8) > 5)


def with_a_length_among_its_outputs():
    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.shape[1]

    launched().setup(Counts(4, 4))(torch.ones(2, 8, 4))


def with_a_number_among_its_outputs():
    class Averages(nn.Linear):
        def forward(self, x):
            return super().forward(x), {"size": x.pow(2).mean().item()}

    launched().setup(Averages(4, 4))(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)))


def with_an_argument_that_may_be_two_things():
    launched().setup(Attend())(torch.ones(8, 8, 4), torch.ones(8, 8, dtype=torch.bool))


def with_an_argument_of_another_length():
    launched(seq_dims={"extra": 0}).setup(Attend())(torch.ones(1, 8, 4), torch.ones(5))


BAD_CALLS = {
    without_sequence: "without a tensor that has a dimension 1",
    with_batch_norm: "has batch norm or scale_grad_by_freq (1)",
    where_blocks_match_nothing: "matches no module inside Fourfold",
    with_gradients_by_frequency: "has batch norm or scale_grad_by_freq (0)",
    with_a_nested_tensor: "write nn.TransformerEncoder(..., enable_nested_tensor=False)",
    with_a_length_among_its_outputs: "than for the whole (4 in place of 8)",
    with_a_number_among_its_outputs: "gives other numbers for the parts of a sequence than for the whole (",
    with_an_argument_that_may_be_two_things: "is ambiguous whether extra",
    with_an_argument_of_another_length: "extra of Attend has shape [5]",
}


def text_of(bad):
    try:
        bad()
    except (UsageError, ConfigurationError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("bad", BAD_CALLS, ids=[bad.__name__ for bad in BAD_CALLS])
def test_models_and_arguments_that_cannot_be_divided(ranks, bad):
    texts = ranks.run(text_of, bad, world_size=2)
    assert all([BAD_CALLS[bad] in text for text in texts]), texts


def compiled(what):
    warnings.simplefilter("ignore")  # of what torch's compiler looks at
    fabric = launched(blocks={Attend})
    torch.manual_seed(1)
    plain = Fourfold()
    model = copy.deepcopy(plain)
    if what == "block":
        model.inner.compile(backend="eager")
    if what == "model":
        model = torch.compile(model, backend="eager")
    model = fabric.setup(model)
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        fabric.backward(model(x).square().mean())
        plain(x).square().mean().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("what", ["block", "model"])
def test_what_is_divided_runs_uncompiled(ranks, what):
    ranks.run(compiled, what, world_size=2)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ContextParallel(0), ConfigurationError, "size=0 must be 1 or more"),
        (lambda: ContextParallel(2.0), ArgumentTypeError, "size=2.0 must be a whole number"),
        (lambda: ContextParallel(seq_dim=-1), ConfigurationError, "seq_dim=-1 must be 0 or more"),
        (lambda: ContextParallel(seq_dim=None), ArgumentTypeError, "seq_dim=None must be a whole number"),
        (lambda: ContextParallel(blocks="Block"), ArgumentTypeError, "blocks='Block'"),
        (lambda: ContextParallel(blocks=set()), ConfigurationError, "blocks is empty"),
        (lambda: ContextParallel(seq_dims={"x": "1"}), ArgumentTypeError, "seq_dims['x']"),
        (lambda: DDPStrategy(context_parallel=2), ArgumentTypeError, "ContextParallel(2) for two ranks"),
        (
            lambda: DDP2Strategy(context_parallel=ContextParallel()),
            ConfigurationError,
            "or write DDPStrategy",
        ),
        (
            lambda: Fabric(
                accelerator="cpu", devices=4, strategy=DDPStrategy(context_parallel=ContextParallel(3))
            ),
            ConfigurationError,
            "4 ranks cannot be divided into rows of 3",
        ),
    ],
)
def test_bad_settings(make, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        make()


def another_batch():
    fabric = launched()
    model = fabric.setup(Attend())
    try:
        model(torch.full((1, 8, 4), float(fabric.global_rank)))
    except CollectiveMismatch as error:
        text = str(error)
    model(torch.ones(1, 8, 4))
    return text


def test_ranks_of_a_row_with_other_data_are_told(ranks):
    for text in ranks.run(another_batch, world_size=2):
        assert "need the same batch" in text
        assert "forward of model 0 (Attend)" in text


def fails_once():
    fabric = launched()
    model = fabric.setup(Attend("fails"))
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(1, 8, 4))
    assert_left()
    model.module.how = "causal"
    torch.manual_seed(0)
    x = torch.randn(1, 8, 4)
    plain = Attend()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), plain(x))


def test_a_forward_that_fails_leaves_nothing_behind(ranks):
    ranks.run(fails_once, world_size=2)


def drop():
    fabric = launched(blocks={Attend})
    torch.manual_seed(1)
    model = fabric.setup(Fourfold("dropout"))
    x = torch.ones(2, 16, 4)
    torch.manual_seed(11)
    outputs = [model(x), model(x)]
    outside = torch.rand(3)
    torch.manual_seed(11)
    again = model(x)
    return [out.detach() for out in outputs], outside, again.detach()


def test_dropout_differs_between_parts_and_steps_and_comes_again_with_the_seed(ranks):
    (outputs, outside, again), (others, outside_there, _) = ranks.run(drop, world_size=2)
    assert torch.equal(outputs[0], others[0])
    assert torch.equal(outputs[1], others[1])
    assert torch.equal(outside, outside_there), "outside all ranks draw alike"
    assert torch.equal(outputs[0], again)
    assert not torch.equal(outputs[0], outputs[1])
    dropped = outputs[0] == 0
    first, last, middle = dropped[:, :4], dropped[:, 12:], dropped[:, 4:12]
    assert not torch.equal(torch.cat([first, last], 1), middle), (
        "parts are dropped out by streams of their own"
    )


def several():
    fabric = launched(blocks={Attend})
    torch.manual_seed(1)
    plain = Fourfold()
    model = fabric.setup(copy.deepcopy(plain))
    long, short, one = torch.randn(2, 17, 4), torch.randn(2, 9, 4), torch.randn(2, 1, 4)
    dist.broadcast(long, 0), dist.broadcast(short, 0), dist.broadcast(one, 0)
    with fabric.no_backward_sync(model):
        fabric.backward(model(long).square().mean())
    fabric.backward(model(short).square().mean() + model(long).square().mean() + model(one).sum())
    (plain(long).square().mean() * 2 + plain(short).square().mean() + plain(one).sum()).backward()
    assert_same_gradients(model, plain)
    shadow = copy.deepcopy(model)
    with torch.inference_mode():
        torch.testing.assert_close(shadow(short), plain(short))
    wanted = long.clone().requires_grad_()
    fabric.backward(model(wanted).square().mean())
    (expected,) = torch.autograd.grad(plain(same := long.clone().requires_grad_()).square().mean(), same)
    torch.testing.assert_close(wanted.grad, expected)


def test_lengths_accumulation_copies_and_gradients_of_inputs(ranks):
    ranks.run(several, world_size=2)


def rows():
    fabric = launched(2)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2))
    kwargs = fabric.strategy.distributed_sampler_kwargs
    total = fabric.all_reduce(torch.tensor(1.0), reduce_op="sum")
    return (
        [batch.tolist() for batch in loader],
        kwargs,
        total.item(),
        dist.get_process_group_ranks(fabric.strategy.data_group),
    )


def test_ranks_of_a_row_get_the_same_batches(ranks):
    found = ranks.run(rows, world_size=4)
    assert [kwargs for _, kwargs, _, _ in found] == [{"num_replicas": 2, "rank": row} for row in (0, 0, 1, 1)]
    assert found[0][0] == found[1][0]
    assert found[2][0] == found[3][0]
    assert sorted([value for batch in found[0][0] + found[2][0] for value in batch]) == list(range(8))
    assert [seen for _, _, *seen in found] == [[4.0, [rank % 2, rank % 2 + 2]] for rank in range(4)]


def biased(inside):
    fabric = launched()
    torch.manual_seed(1)
    plain = Biased(inside)
    model = fabric.setup(copy.deepcopy(plain))
    x = torch.randn(2, 10, 4)
    dist.broadcast(x, 0)
    bias, same = torch.zeros(10, 10).requires_grad_(), torch.zeros(10, 10).requires_grad_()
    fabric.backward(model(x, bias).square().mean())
    plain(x, same).square().mean().backward()
    torch.testing.assert_close(bias.grad, same.grad)
    assert_same_gradients(model, plain)


class Biased(nn.Module):
    """A bias by distance, and one from outside, that learn."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.project = nn.Linear(4, 12)
        self.slope = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x, bias):
        query, key, value = self.project(x).chunk(3, -1)
        if self.inside:
            here = sequence_positions(x.shape[1])
            away = (here[:, None] - torch.arange(len(bias))).abs()  # the bias is whole everywhere
            return F.scaled_dot_product_attention(query, key, value, -self.slope * away) + 0 * bias.sum()
        return F.scaled_dot_product_attention(query, key, value, bias * self.slope)


@pytest.mark.parametrize("inside", [False, True])
def test_biases_that_learn(ranks, inside):
    ranks.run(biased, inside, world_size=2)


def keys_kept():
    fabric = launched()
    torch.manual_seed(1)
    plain = nn.Sequential(Attend(), nn.Linear(4, 4), Attend("whole"))
    model = fabric.setup(copy.deepcopy(plain))
    x = torch.randn(2, 13, 4)
    dist.broadcast(x, 0)
    storages, all_gather = [], SequenceExchange.all_gather

    def watched(self, own, dim):
        whole = all_gather(self, own, dim)
        storages.extend([tensor.untyped_storage() for tensor in whole if tensor.requires_grad])
        return whole

    SequenceExchange.all_gather = watched
    try:
        out = model(x)
    finally:
        SequenceExchange.all_gather = all_gather
    assert len(storages) == 4
    for _ in range(2):
        assert all([storage.nbytes() == 0 for storage in storages]), (
            "keys and values of all ranks are there while attention computes"
        )
        fabric.backward(out.square().sum(), retain_graph=True)
        plain(x).square().sum().backward()
    assert all([storage.nbytes() == 0 for storage in storages])
    assert_same_gradients(model, plain)


def test_keys_of_other_ranks_are_not_kept_for_the_backward(ranks):
    ranks.run(keys_kept, world_size=2)


def changes_in_place():
    fabric = launched()
    model = fabric.setup(InPlace())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fabric.backward(model(torch.ones(1, 8, 4)).sum())


class InPlace(nn.Module):
    """Changes what attention has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        query = self.project(x).unsqueeze(1)
        seen = F.scaled_dot_product_attention(query, query * 2, query * 3)
        query.mul_(2)
        return seen.squeeze(1)


def test_what_attention_has_saved_must_not_be_changed(ranks):
    ranks.run(changes_in_place, world_size=2)


class Hiding(nn.Module):
    """What the first numbers of a model or of its data do not show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.positions = nn.Parameter(torch.zeros(1, 64, 4))
        self.scale = nn.Parameter(torch.full((4,), 1e-6))
        self.near = nn.Conv1d(4, 4, 3, padding=1)
        self.register_buffer("mean", torch.zeros(4))
        self.attend = Attend()

    def forward(self, x):
        how = self.how
        if how == "positions":
            return self.attend(x + self.positions[:, : x.shape[1]])
        if how == "scale":
            return x + self.scale * ((x @ x.mT).softmax(-1) @ x)
        if how == "neighbours":
            return x + self.near(x.mT).mT
        if how == "buffer":
            with torch.no_grad():
                self.mean.lerp_(x.detach()[:, 0].mean(0), 0.1)
        if how == "attribute":
            self.extra_loss = x.square().mean()
        return self.attend(x)


def hidden(how):
    model = launched().setup(Hiding(how))
    x = torch.zeros(2, 24, 4)
    x[:, 18:] = torch.arange(6)[:, None]
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(UsageError, match="gives other numbers"):
        model(x)
    assert not hasattr(model.module, "extra_loss")
    for one, other in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(one, other), "a trial leaves parameters and buffers as they were"


@pytest.mark.parametrize("how", ["positions", "scale", "neighbours", "buffer", "attribute"])
def test_what_the_first_numbers_do_not_show_is_refused_too(ranks, how):
    ranks.run(hidden, how, world_size=2)


class Longer(nn.Module):
    """Looks along the sequence if it is long."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True) if x.shape[1] > 15 else x


def grows():
    model = launched().setup(Longer())
    model(torch.ones(2, 24, 4))
    with pytest.raises(UsageError, match="gives other numbers"):
        model(torch.ones(2, 24, 4))


def test_a_second_trial_of_another_length_is_made(ranks):
    ranks.run(grows, world_size=2)


class KeyBias(nn.Module):
    """A float mask of keys, made of the sequence itself."""

    def __init__(self, heads: bool) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(4, 13)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        query, key, value, bias = self.project(x).split([4, 4, 4, 1], -1)
        if self.heads:
            return value + self.attention(query, query, query, key_padding_mask=bias[..., 0])[0] + key
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.mT)
        return seen + self.attention(query, query, query)[0]


def key_bias(heads):
    fabric = launched()
    torch.manual_seed(1)
    plain = KeyBias(heads)
    model = fabric.setup(copy.deepcopy(plain))
    x = torch.randn(2, 11, 4)
    dist.broadcast(x, 0)
    fabric.backward(model(x).square().mean())
    plain(x).square().mean().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("heads", [False, True])
def test_float_masks_of_keys_get_their_gradients(ranks, heads):
    ranks.run(key_bias, heads, world_size=2)


class Recomputed(nn.Module):
    """Attention that is computed again: given to checkpoint as a module, or as a function."""

    def __init__(self, reentrant: bool, function: bool = False) -> None:
        super().__init__()
        self.reentrant, self.function = reentrant, function
        self.layers = nn.ModuleList([Attend(), Attend()])

    def forward(self, x):
        for layer in self.layers:
            call = self.attend if self.function else layer
            x = x + checkpoint(call, x, use_reentrant=self.reentrant)
        return x

    def attend(self, x):
        query, key, value = self.layers[0].project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value)


def lengths(reentrant, blocks):
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    fabric = launched(blocks=blocks)
    torch.manual_seed(1)
    plain = Recomputed(reentrant)
    model = fabric.setup(copy.deepcopy(plain))
    for length in (6, 3, 16, 3, 8, 17, 16):
        x = torch.randn(2, length, 4)
        dist.broadcast(x, 0)
        x.requires_grad_()
        fabric.backward(model(x).square().mean())
        plain(x).square().mean().backward()
        with torch.no_grad():
            model(torch.ones(1, 30, 4))
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("blocks", [None, {Attend}], ids=["model", "blocks"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_lengths_that_change_with_checkpointing(ranks, reentrant, blocks):
    ranks.run(lengths, reentrant, blocks, world_size=2)


def two_lengths(blocks):
    fabric = launched(blocks=blocks)
    torch.manual_seed(1)
    plain = Recomputed(reentrant=False)
    model = fabric.setup(copy.deepcopy(plain))
    long, short = torch.randn(2, 16, 4), torch.randn(2, 8, 4)
    dist.broadcast(long, 0), dist.broadcast(short, 0)
    loss = model(long).square().mean() + model(short).square().mean()
    if blocks is None:
        with pytest.raises(UsageError, match="it is ambiguous for which of several forwards"):
            fabric.backward(loss)
        return
    fabric.backward(loss)
    (plain(long).square().mean() + plain(short).square().mean()).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("blocks", [None, {Attend}], ids=["model", "blocks"])
def test_two_lengths_in_one_backward_with_checkpointing(ranks, blocks):
    ranks.run(two_lengths, blocks, world_size=2)


def a_function_is_computed_again():
    fabric = launched()
    model = fabric.setup(Recomputed(reentrant=True, function=True))
    with pytest.raises(UsageError, match="Pass checkpoint a module"):
        model(torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1)).requires_grad_())


def test_a_function_that_is_computed_again_is_refused(ranks):
    ranks.run(a_function_is_computed_again, world_size=2)


class Beside(nn.Module):
    """A whole sequence outside of what is divided, computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.project = Attend(), nn.Linear(4, 4)

    def forward(self, x, short):
        return self.inner(x) + checkpoint(self.beside, short, use_reentrant=False).mean(1, keepdim=True)

    def beside(self, short):
        here = sequence_positions(short.shape[1])
        return (self.project(short) * here[:, None]).tanh()


def beside():
    fabric = launched(blocks={Attend})
    torch.manual_seed(1)
    plain = Beside()
    model = fabric.setup(copy.deepcopy(plain))
    x = torch.randn(2, 16, 4)
    for length in (37, 16):
        short = torch.randn(2, length, 4)
        fabric.backward(model(x, short).square().mean())
        plain(x, short).square().mean().backward()
        assert_same_gradients(model, plain)
    loss = model(x, torch.randn(2, 8, 4))  # as long as a part
    with pytest.raises(UsageError, match="it is unknown whether the input is a full sequence or a shard"):
        fabric.backward(loss.square().mean())


def test_positions_of_what_is_computed_again_are_not_guessed(ranks):
    ranks.run(beside, world_size=2)


def drop_in_evaluation():
    fabric = launched()
    model = fabric.setup(Attend("dropout")).eval()
    model.module.drop.train()
    torch.manual_seed(3)
    out = model(torch.ones(2, 13, 4))
    return out, torch.rand(2)


def test_dropout_in_evaluation_leaves_ranks_alike(ranks):
    (one, after), (other, after_there) = ranks.run(drop_in_evaluation, world_size=2)
    assert torch.equal(one, other)
    assert torch.equal(after, after_there)


def pickled():
    fabric = launched()
    model = fabric.setup(Attend())
    file = io.BytesIO()
    inner = model.module
    while not isinstance(inner, Attend):
        inner = inner.module
    torch.save(inner, file)
    file.seek(0)
    alone = torch.load(file, weights_only=False)
    x = torch.ones(1, 8, 4)
    if fabric.global_rank == 0:
        alone(x)  # whole, on this rank alone


def test_a_pickled_model_is_whole_again(ranks):
    ranks.run(pickled, world_size=2)


def test_without_ranks_positions_are_those_of_the_whole():
    assert sequence_positions(3).tolist() == [0, 1, 2]
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup(Attend())
    assert model(torch.ones(1, 1, 4)).shape == (1, 1, 4)
