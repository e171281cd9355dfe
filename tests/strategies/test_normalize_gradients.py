"""Summed losses, divided by the items of all ranks and micro-batches, have the gradients of one big batch."""

import itertools
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_dp_ddp2 import machines
from test_layouts import LAYOUTS, TOLERANCE, launched, net, parts, scaler
from torch import nn

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, UsageError
from fabric.guard.control_connections import ControlConnections
from fabric.plugins.precision import MixedPrecision
from fabric.strategies import DDPStrategy

WIDTH = 6
FEW = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
"""As in test_verbs_properties: the same examples on every run, and no shrinking, which costs new ranks."""


def tokens(counts: list[list[int]]) -> list[list[torch.Tensor]]:
    """A step's items by part of the data and micro-batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [[torch.randint(0, 9, (n,), generator=generator) for n in micros] for micros in counts]


def summed_loss(model, items: torch.Tensor, padded: bool = False) -> torch.Tensor:
    """The sum over items; padded ones have a target that counts for nothing."""
    targets = (items + 1) % 9
    if padded:
        targets = F.pad(targets, (0, WIDTH - len(targets)), value=-100)
        items = F.pad(items, (0, WIDTH - len(items)))
    return F.cross_entropy(model(items).float(), targets, reduction="sum")


def double_loss(model, items: torch.Tensor, padded: bool = False) -> torch.Tensor:
    """As `summed_loss`, without its step through float32."""
    return F.cross_entropy(model(items).double(), (items + 1) % 9, reduction="sum")


def accumulate(fabric: Fabric, model, micros: list[torch.Tensor], padded=False, loss=summed_loss) -> int:
    """All backwards of a step on this rank; gives its number of items."""
    for i, items in enumerate(micros):
        with fabric.no_backward_sync(model, enabled=i < len(micros) - 1):
            fabric.backward(loss(model, items, padded))
    return sum([len(items) for items in micros])


def mine(fabric: Fabric, counts: list[list[int]]) -> list[torch.Tensor]:
    """The micro-batches of this rank."""
    return tokens(counts)[(fabric.strategy.distributed_sampler_kwargs or {"rank": 0})["rank"]]


def gradients(model) -> dict[str, torch.Tensor]:
    """Copies of all gradients, whole. All ranks."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    return {name: g.detach().clone() for name, g in full.items()}


def plain_gradients(model: nn.Module, counts: list[list[int]], loss=summed_loss) -> dict[str, torch.Tensor]:
    """The oracle: one process, one batch, the mean over its items."""
    items = torch.cat(list(itertools.chain(*tokens(counts))))
    model.zero_grad()
    (loss(model, items) / max(len(items), 1)).backward()
    return gradients(model)


def total(counts: list[list[int]]) -> int:
    return sum(map(sum, counts))


def assert_same(got: dict, expected: dict, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    assert list(got) == list(expected)
    for name, want in expected.items():
        torch.testing.assert_close(
            got[name], want, atol=atol, rtol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )


# Splits


def through_steps(steps: list[list[list[int]]]) -> list[tuple[int, dict]]:
    fabric = launched("ddp")
    model = fabric.setup(net("ddp").double())
    results = []
    for counts in steps:
        model.zero_grad()
        count = accumulate(fabric, model, mine(fabric, counts), loss=double_loss)
        results.append((fabric.normalize_gradients(model, count), gradients(model)))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_split_equals_the_big_batch(ranks, world_size):
    micros = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n))
    step = st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=world_size, max_size=world_size
        )
    )
    uneven = st.lists(micros, min_size=world_size, max_size=world_size)  # each rank its own micro-batches

    @settings(max_examples=4, **FEW)
    @given(steps=st.lists(step | uneven, min_size=3, max_size=5))
    def examples(steps):
        steps.append([[3, 0, 2], *[[0, 0]] * (world_size - 1)])  # all items on one rank
        results = ranks.run(through_steps, steps, world_size=world_size)
        reference = net("ddp").double()
        for i, counts in enumerate(steps):
            expected = plain_gradients(reference, counts, double_loss)
            for each in results:
                count, got = each[i]
                assert (count, type(count)) == (total(counts), int)
                assert_same(got, expected, atol=1e-12, rtol=1e-9)  # in float64

    examples()


COUNTS = {
    1: [[4, 0, 3]],
    2: [[4, 0, 3], [1, 5, 2]],
    3: [[4, 0, 3], [1, 5, 2], [0, 0, 0]],
    4: [[4, 0, 3], [1, 5, 2], [0, 0, 0], [2, 6, 0]],
}
"""By number of parts: uneven, with empty micro-batches and an empty rank."""
LARGE = ("hsdp", "tp-dp", "tp-fsdp")


def layout_gradients(layout: str, steps: int, use_optimizer: bool) -> list[tuple[int, dict]]:
    fabric = launched(layout)
    model = fabric.setup_module(net(layout))
    held = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fabric.setup_optimizers(held) if use_optimizer else None
    counts = COUNTS[parts(layout, fabric.world_size)]
    results = []
    for _ in range(steps):
        model.zero_grad()
        count = accumulate(fabric, model, mine(fabric, counts), padded=True)
        found = fabric.normalize_gradients(model, count, optimizer=optimizer)
        results.append((found, gradients(model)))
    return results


@pytest.mark.parametrize("use_optimizer", [False, True], ids=["module", "optimizer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_big_batch(ranks, layout, use_optimizer):
    world = 4 if layout in LARGE else 2
    counts = COUNTS[parts(layout, world)]
    expected = plain_gradients(net(layout), counts)
    for results in ranks.run(layout_gradients, layout, 2, use_optimizer, world_size=world):
        for count, got in results:
            assert count == total(counts)
            assert_same(got, expected)


@pytest.mark.parametrize(
    "settings", [{"strategy": "auto"}, {"strategy": "dp", "devices": 3}], ids=["single", "dp"]
)
def test_one_process_equals_the_big_batch(settings):
    fabric = Fabric(**{"accelerator": "cpu", "devices": 1, **settings})
    fabric.launch()
    model = fabric.setup(net("ddp"))
    count = accumulate(fabric, model, mine(fabric, [[4, 5, 3]]))
    with messages() as sent:
        assert fabric.normalize_gradients(model, count) == 12
    assert not sent
    assert_same(gradients(model), plain_gradients(net("ddp"), [[4, 5, 3]]))


def machine_gradients(devices: int) -> tuple[int, dict]:
    fabric = machines(devices)
    model = fabric.setup(net("ddp"))
    count = accumulate(fabric, model, mine(fabric, COUNTS[fabric.world_size]), padded=True)
    found = fabric.normalize_gradients(model, count), gradients(model)
    fabric.strategy.teardown()
    return found


def test_ddp2_counts_each_machine_once(ranks):
    expected = plain_gradients(net("ddp"), COUNTS[2])
    for count, got in ranks.run(machine_gradients, 2, world_size=2):
        assert count == total(COUNTS[2])
        assert_same(got, expected)


# Training: with precisions, clipping and steps

STEPS = 3


def train(layout: str, precision: str) -> tuple[list[torch.Tensor], dict]:
    fabric = launched(layout, precision)
    model = net(layout)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        counts = COUNTS[parts(layout, fabric.world_size)]
        count = torch.tensor(accumulate(fabric, model, mine(fabric, counts), padded=True))
        fabric.normalize_gradients(model, count)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.05))
        optimizer.step()
    return norms, fabric.strategy.get_module_state_dict(model)


def train_plain(layout: str, world: int, precision: str) -> tuple[list[torch.Tensor], dict]:
    # The scale of `launched`: from the default one gradients overflow, and the first steps are skipped.
    plugin = MixedPrecision(precision, "cpu", scaler=scaler()) if precision == "16-mixed" else None
    fabric = Fabric(accelerator="cpu", devices=1, precision=None if plugin else precision, plugins=plugin)
    model = net(layout)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    items = torch.cat(list(itertools.chain(*tokens(COUNTS[parts(layout, world)]))))
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(summed_loss(model, items) / len(items))
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.05))
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *[(layout, "32-true") for layout in ("ddp", "zero1", "zero3", "tp-fsdp")],
        *[(layout, "16-mixed") for layout in ("ddp", "zero1", "zero2", "zero3")],
        ("ddp", "bf16-mixed"),
        ("zero3", "bf16-true"),
    ],
)
def test_training_with_clipping_equals_the_big_batch(ranks, layout, precision):
    world = 4 if layout in LARGE else 2
    norms, weights = train_plain(layout, world, precision)
    assert min(norms) > 0.05, "clipping must change something"
    tolerance = TOLERANCE[precision]
    for got_norms, got in ranks.run(train, layout, precision, world_size=world):
        for norm, want in zip(got_norms, norms, strict=True):
            torch.testing.assert_close(norm.float(), want.float(), atol=tolerance, rtol=10 * tolerance)
        assert_same(got, weights, atol=tolerance, rtol=tolerance)


# Messages


@contextmanager
def messages():
    """How often each function of torch.distributed is called."""
    calls: Counter[str] = Counter()

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    kinds = ("all_", "broadcast", "barrier", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv")
    names = [n for n in dir(dist) if n.startswith(kinds) and callable(getattr(dist, n)) and "_op" not in n]
    patched = {name: counting(name, getattr(dist, name)) for name in names}
    with (
        mock.patch.multiple(dist, **patched),
        mock.patch.object(ControlConnections, "start", counting("frame", ControlConnections.start)),
    ):
        yield calls


def count_reductions(layout: str) -> tuple[int, Counter]:
    """Gradient reductions of STEPS steps, and what normalising sends after the first step."""
    fabric = launched(layout)
    model = fabric.setup(net(layout))
    buckets = []
    if layout == "ddp":
        model._forward_module.register_comm_hook(buckets, count_and_reduce)
    scattered, sent = 0, Counter()
    for step in range(STEPS):
        model.zero_grad()
        with messages() as calls:
            count = accumulate(fabric, model, mine(fabric, COUNTS[fabric.world_size]), padded=True)
        scattered += sum([number for name, number in calls.items() if name.startswith("reduce_scatter")])
        with messages() as calls:
            fabric.normalize_gradients(model, count)
        sent += calls if step else Counter()
    return scattered + len(buckets), sent


def count_and_reduce(calls: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


@pytest.mark.parametrize(
    ("layout", "reductions"),
    [("ddp", 1), ("zero3-one-group", len(COUNTS[2][0])), ("zero3", 3 * len(COUNTS[2][0]))],
)
def test_gradients_are_reduced_once_a_step_or_a_backward_and_the_count_is_one_message(
    ranks, layout, reductions
):
    """DDP reduces once a step, of one bucket; what is split reduces each group in each backward."""
    expected = (reductions * STEPS, Counter(frame=STEPS - 1))  # frames, in which the count rides
    assert ranks.run(count_reductions, layout, world_size=2) == [expected, expected]


@pytest.mark.parametrize("mode", ["light", "off"])
def test_without_whole_frames_the_numbers_are_the_same(ranks, mode):
    expected = plain_gradients(net("zero3"), COUNTS[2])
    for count, got in ranks.run(under_guard, mode, world_size=2):
        assert count == total(COUNTS[2])
        assert_same(got, expected)


def under_guard(mode: str) -> tuple[int, dict]:
    with mock.patch.dict("os.environ", FABRIC_GUARD=mode):
        (found,) = layout_gradients("zero3", 1, False)
    return found


# What gradients there are


class Sparse(nn.Module):
    """An embedding with sparse gradients, a layer, one that is frozen, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(9, 4, sparse=True)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 9)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.fixed(self.embed(x)))


def sparse_gradients() -> dict:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=False),
    )
    fabric.launch()
    model = fabric.setup(Sparse())
    count = accumulate(fabric, model, mine(fabric, COUNTS[2]))
    assert fabric.normalize_gradients(model, count) == total(COUNTS[2])
    assert model.embed.weight.grad.is_sparse
    found = gradients(model)
    return {name: g.to_dense() for name, g in found.items() if g.abs().sum() > 0}


def test_sparse_frozen_and_unused_parameters(ranks):
    expected = {name: g.to_dense() for name, g in plain_gradients(Sparse(), COUNTS[2]).items()}
    assert list(expected) == ["embed.weight", "head.weight", "head.bias"]
    for got in ranks.run(sparse_gradients, world_size=2):
        assert_same(got, expected)


def several_models(layout: str) -> dict[str, dict]:
    """Two models, one optimizer of both, another of one alone."""
    fabric = launched(layout)
    one, two = fabric.setup_module(net(layout)), fabric.setup_module(net(layout))
    both = fabric.setup_optimizers(torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1))
    heads = torch.optim.SGD([two.head.weight], lr=0.1)  # the user's own, as it is
    items, found = mine(fabric, COUNTS[2]), {}
    for name, module, optimizer in [("one", one, None), ("both", one, both), ("heads", one, heads)]:
        both.zero_grad()
        count = accumulate(fabric, one, items, padded=True)
        accumulate(fabric, two, items, padded=True)
        fabric.normalize_gradients(module, count, optimizer=optimizer)
        found[name] = gradients(one), gradients(two)
    return found


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_with_several_models_exactly_what_was_named_is_divided(ranks, layout):
    mean = plain_gradients(net(layout), COUNTS[2])
    left = {name: g * (total(COUNTS[2]) / 2) for name, g in mean.items()}  # the mean over 2 ranks of sums
    heads = {name: mean[name] if name == "embed.weight" else g for name, g in left.items()}  # tied to it
    for found in ranks.run(several_models, layout, world_size=2):
        for name, expected in {"one": (mean, left), "both": (mean, mean), "heads": (left, heads)}.items():
            assert_same(found[name][0], expected[0], atol=1e-5)
            assert_same(found[name][1], expected[1], atol=1e-5)


def compiled_gradients(where: str) -> dict:
    fabric = launched("ddp")
    model = net("ddp")
    if where == "before setup":
        model = fabric.setup(torch.compile(model, backend="eager"))
    else:
        model = torch.compile(fabric.setup(model), backend="eager")
    count = accumulate(fabric, model, mine(fabric, COUNTS[2]), padded=True)
    fabric.normalize_gradients(model, count)
    return {name.replace("_orig_mod.", ""): g for name, g in gradients(model).items()}


@pytest.mark.parametrize("where", ["before setup", "after setup"])
def test_a_compiled_model(ranks, where):
    for got in ranks.run(compiled_gradients, where, world_size=2):
        assert_same(got, plain_gradients(net("ddp"), COUNTS[2]))


def test_a_gradient_that_stands_twice_is_divided_once():
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Linear(2, 2, bias=False))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([model.weight, model.weight], lr=0.1)
    fabric.backward(model(torch.ones(1, 2)).sum())
    fabric.normalize_gradients(model, 4, optimizer=optimizer)
    assert torch.equal(model.weight.grad, torch.full((2, 2), 0.25))


# Counts


def counted(values: list) -> list:
    """What each way to write a rank's count comes to."""
    fabric = launched("ddp")
    model = fabric.setup(nn.Linear(1, 1, bias=False))
    found = []
    for value in values[fabric.global_rank]:
        model.zero_grad()
        fabric.backward(model(torch.full((1, 1), 3.0)).sum())
        found.append((fabric.normalize_gradients(model, value), model.weight.grad.item()))
    return found


def test_counts_are_exact_and_of_every_kind(ranks):
    values = [
        (2**24, 1, 2**24 + 1),  # float32 ends at 2**24
        (2**53, 1, 2**53 + 1),  # float64 ends at 2**53
        (torch.tensor(2**53), torch.tensor([1]), 2**53 + 1),
        (2**62, 2**62 + 1, 2**63 + 1),  # more than the int64 in which counts travel
        (np.int64(3), torch.tensor([[2]], dtype=torch.int16), 5),
        (torch.tensor(2.5), np.float32(0.5), 3.0),
        (0.1, 0.2, 0.1 + 0.2),
        (2, 0.5, 2.5),
        (0, 3, 3),
        (0, 0, 0),
        (0.0, 0, 0.0),
    ]
    results = ranks.run(counted, [[v[0] for v in values], [v[1] for v in values]], world_size=2)
    for found in results:
        for (count, grad), (*_, expected) in zip(found, values, strict=True):
            assert (count, type(count)) == (expected, type(expected))
            assert grad == pytest.approx(6 / expected if expected else 3.0, rel=1e-6)


# What is refused

SET_UP = object()
BAD = {
    "a list": (SET_UP, [3], None, ArgumentTypeError, "one-element tensor, but got [3]"),
    "text": (SET_UP, "3", None, ArgumentTypeError, "one-element tensor, but got '3'"),
    "None": (SET_UP, None, None, ArgumentTypeError, "one-element tensor, but got None"),
    "a bool": (SET_UP, True, None, ArgumentTypeError, "one-element tensor, but got True"),
    "a bool tensor": (SET_UP, torch.tensor(True), None, ArgumentTypeError, "but got True"),
    "several": (SET_UP, torch.ones(3), None, ArgumentTypeError, "but got tensor([1., 1., 1.])"),
    "empty": (SET_UP, torch.ones(0), None, ArgumentTypeError, "but got tensor([])"),
    "meta": (SET_UP, torch.ones(1, device="meta"), None, ArgumentTypeError, "device='meta', size=(1,)"),
    "complex": (SET_UP, 1j, None, ArgumentTypeError, "but got 1j"),
    "negative": (SET_UP, -1, None, ConfigurationError, "num_items=-1 is not a number of items"),
    "negative tensor": (SET_UP, torch.tensor(-2.0), None, ConfigurationError, "num_items=-2.0 is not"),
    "NaN": (SET_UP, float("nan"), None, ConfigurationError, "num_items=nan is not a number of items"),
    "infinite": (SET_UP, torch.tensor(torch.inf), None, ConfigurationError, "num_items=inf is not"),
    "too large": (SET_UP, 2**63, None, ConfigurationError, "less than 2**63"),
    "not set up": (nn.Linear(1, 1), 1, None, UsageError, "needs a model that is set up, but got Linear"),
    "an optimizer first": ("optimizer", 1, None, UsageError, "needs a model that is set up, but got"),
    "no optimizer": (SET_UP, 1, "sgd", ArgumentTypeError, "needs torch's Optimizer, but got str"),
}


def refused(names: list[str], wrong: tuple[int, ...], layout: str) -> list[tuple[str, str]]:
    """The error on this rank where those in `wrong` make a mistake; then the call is made rightly."""
    fabric = launched(layout)
    model = fabric.setup(net(layout))
    found = []
    accumulate(fabric, model, mine(fabric, COUNTS[parts(layout, fabric.world_size)]), padded=True)
    before = gradients(model)
    for name in names:
        module, count, optimizer = BAD[name][:3] if fabric.global_rank in wrong else (SET_UP, 1, None)
        if module == "optimizer":
            module = torch.optim.SGD(model.parameters(), lr=0.1)
        module = model if module is SET_UP else module
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            fabric.normalize_gradients(module, count, optimizer=optimizer)
        found.append((type(caught.value).__name__, str(caught.value)))
    assert_same(gradients(model), before, atol=0, rtol=0)  # nothing was divided
    assert fabric.normalize_gradients(model, 1) == parts(layout, fabric.world_size)
    return found


@pytest.mark.parametrize("wrong", [(1,), (0, 1)], ids=["on one rank", "on both"])
def test_a_bad_argument_is_one_error_on_all_ranks(ranks, wrong):
    for found in ranks.run(refused, list(BAD), wrong, "ddp", world_size=2):
        for (kind, text), (*_, error, expected) in zip(found, BAD.values(), strict=True):
            assert expected in text
            assert kind == (error if len(wrong) == 2 else CollectiveMismatch).__name__
            assert ("Rank 1 refused the arguments of normalize_gradients" in text) == (len(wrong) == 1)


def test_a_bad_argument_reaches_ranks_of_other_data_groups(ranks):
    """Of 2 x 2 ranks, rank 0 sends its count to rank 2 only, but 1 and 3 would wait in the next forward."""
    for found in ranks.run(refused, ["NaN", "text"], (0,), "tp-fsdp", world_size=4):
        assert [kind for kind, _ in found] == ["CollectiveMismatch"] * 2
        assert "num_items=nan is not a number of items" in found[0][1]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_on_one_process(name):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Linear(1, 1))
    module, count, optimizer, error, text = BAD[name]
    with pytest.raises(error) as caught:
        fabric.normalize_gradients(model if module is SET_UP else module, count, optimizer=optimizer)
    assert text in str(caught.value)


def differently_counted() -> str:
    fabric = launched("tp-dp")
    model = fabric.setup(net("tp-dp"))
    accumulate(fabric, model, mine(fabric, COUNTS[2]), padded=True)
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.normalize_gradients(model, 3 + (fabric.global_rank == 1))
    # Ranks of one part may round a sum of floats in their own ways.
    weight = 1.5 + 1e-12 * (fabric.global_rank == 1)
    assert fabric.normalize_gradients(model, weight) == 3.0
    return str(caught.value)


def test_ranks_that_share_data_must_count_alike(ranks):
    texts = ranks.run(differently_counted, world_size=4)
    assert len(set(texts)) == 1
    assert "rank 0: 3 items of part 0 of the data\n  rank 1: 4 items of part 0 of the data" in texts[0]


def unsynchronised(layout: str, wrong: tuple[int, ...]) -> str:
    fabric = launched(layout)
    model = fabric.setup(net(layout))
    items = mine(fabric, COUNTS[2])
    with fabric.no_backward_sync(model):
        fabric.backward(summed_loss(model, items[0], True))
    if fabric.global_rank not in wrong:
        model.zero_grad()
    with pytest.raises(UsageError) as caught:
        fabric.normalize_gradients(model, 1)
    model.zero_grad()
    count = accumulate(fabric, model, items, padded=True)
    fabric.normalize_gradients(model, count)
    assert_same(gradients(model), plain_gradients(net(layout), COUNTS[2]))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("wrong", [(0, 1), (0,)], ids=["both", "one"])
def test_gradients_that_wait_for_their_sync_are_refused(ranks, wrong):
    for text in ranks.run(unsynchronised, "ddp", wrong, world_size=2):
        assert text.startswith("UsageError")
        assert "gradients that were never synchronised" in text


def test_before_launch():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    with pytest.raises(UsageError, match=r"normalize_gradients\(\) was used before fabric.launch\(\)"):
        fabric.normalize_gradients(nn.Linear(1, 1), 1)


def one_rank_alone() -> str:
    fabric = launched("ddp")
    model = fabric.setup(nn.Linear(1, 1))
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.normalize_gradients(model, 1) if fabric.global_rank else fabric.barrier()
    return str(caught.value)


def test_a_rank_that_makes_another_call(ranks):
    for text in ranks.run(one_rank_alone, world_size=2):
        assert "normalize_gradients" in text
        assert "Ranks made different calls" in text


# Strategies of users


class Halving(DDPStrategy):
    """Notes what it is asked for, and halves what comes of it."""

    def normalize_gradients(self, module, num_items, optimizer=None):
        self.asked = type(module).__name__, num_items, type(optimizer).__name__
        count = super().normalize_gradients(module, num_items, optimizer)
        self.layout.divide_gradients(module.parameters(), 2)
        return count


def overriding() -> tuple:
    strategy = Halving()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.full((4, 1), 3.0)).sum())
    count = fabric.normalize_gradients(model, torch.tensor(4), optimizer=optimizer)
    return strategy.asked, count, model.weight.grad.item()


def test_an_override_of_the_strategys_method_takes_effect(ranks):
    expected = (("Linear", 4, "SGD"), 8, 1.5)
    assert ranks.run(overriding, world_size=2) == [expected, expected]
