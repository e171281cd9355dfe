"""Under a pipeline, models that are not set up (an average of the weights, a teacher) are loaded whole."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import PipelineStrategy


class Net(nn.Module):
    """Three blocks, two of which share a weight; a buffer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(3.0))
        self.note = 0

    def pipeline_blocks(self):
        return [self.first, self.second, self.last]

    def forward(self, x):
        return self.last(self.second(self.first(x)))

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def start(strategy="pipeline"):
    if strategy == "pipeline":
        strategy = PipelineStrategy(balance=[2, 1], num_microbatches=2)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def assert_same(model, plain):
    got, expected = model.state_dict(), plain.state_dict()
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key
    assert not any([value.is_meta for value in got.values() if isinstance(value, torch.Tensor)])


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def writes(path, strategy):
    fabric = start(strategy)
    model = net(1)
    model.note = 7
    fabric.save(path, {"model": fabric.setup(model), "ema": net(2)})


def reads(path):
    """Before setup, into a copy, raw, and without memory; then all of it goes on as ever."""
    fabric = start()
    model, saved = net(3), net(1)
    saved.note = 7
    ema = copy.deepcopy(model)
    fabric.load(path, {"model": model, "ema": ema})
    assert_same(model, saved)
    assert_same(ema, net(2))
    assert model.last.weight is model.first.weight
    with torch.no_grad():
        assert torch.equal(model(X), saved(X))
    teacher = net(4)
    fabric.load_raw(path.replace(".pt", "_raw.pt"), teacher)
    assert_same(teacher, saved)
    with fabric.init_module(empty_init=True):
        bare = Net()
    fabric.load(path, {"model": bare})
    for loaded in (model, bare, teacher):
        cut = fabric.setup(loaded)
        assert_same(cut, saved)
        with torch.no_grad():
            assert torch.allclose(cut(X), saved(X))
    cut.note = 0  # of the model itself, which is in no block
    fabric.load(path, {"model": cut, "ema": ema})
    assert_same(cut, saved)


@pytest.mark.parametrize("writer", ["pipeline", "ddp", "one process"])
def test_models_that_are_not_set_up_are_loaded_whole(ranks, tmp_path, writer):
    path = str(tmp_path / "saved.pt")
    ranks.run(writes, path, writer.replace("one process", "auto"), world_size=1 if " " in writer else 2)
    torch.save(torch.load(path, weights_only=True)["model"], tmp_path / "saved_raw.pt")
    ranks.run(reads, path, world_size=2)


def wrong(path, strategy):
    fabric = start(strategy)
    texts = []
    for model in (nn.Sequential(nn.Linear(4, 4)), net(), net()):
        if texts:
            model.extra = nn.Linear(2, 2) if len(texts) == 1 else None
        if len(texts) == 2:
            model.second = nn.Linear(5, 4)
        with pytest.raises(RuntimeError) as caught:
            fabric.load(path, {"model": model})
        texts.append(str(caught.value))
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(match="0 of 2 tensors") if fabric.is_global_zero else nullcontext():
        fabric.load(path, {"model": model}, strict=False)
    return texts


def test_what_does_not_fit_is_told_as_under_ddp(ranks, tmp_path):
    path = str(tmp_path / "saved.pt")
    ranks.run(writes, path, "auto", world_size=1)
    ours, theirs = [ranks.run(wrong, path, strategy, world_size=2) for strategy in ("pipeline", "ddp")]
    assert ours == theirs
    assert "Missing key(s)" in ours[0][0]
    assert "Unexpected key(s)" in ours[0][0]
    assert "size mismatch for second.weight" in ours[0][2]


def taken_from_raw_objects(path):
    fabric = start()
    module = net()
    raw = torch.optim.Adam(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, raw)
    own = torch.optim.Adam(model.parameters(), lr=0.1)  # never set up
    fabric.backward(model(X).pow(2).mean())
    for one in (optimizer, own):
        one.step()
    one_stage = r"Adam\.state_dict\(\) of .* has only this stage's part of the states.*fabric\.setup returned"
    for held in (raw, optimizer.optimizer, own):
        with pytest.raises(UsageError, match=one_stage):
            held.state_dict()
    assert sorted(optimizer.state_dict()["state"]) == list(range(5))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    for state in (
        {"model": module.state_dict()},
        {"all": [{"net": model.module.state_dict()}]},
        {"average": own},
        {"average": list(own.values())},
        {"own": {name: p for name, p in own.items() if p.numel()}},
    ):
        with pytest.raises(UsageError, match="would be lost: the first stage of the pipeline") as raised:
            fabric.save(path, state)
        assert 'fabric.save(path, {"model": model})' in str(raised.value)
    fabric.save(path, {"model": model, "optimizer": optimizer})


def forgotten_in_setup():
    fabric = start()
    with fabric.init_module(empty_init=True):
        empty = net()
    for module, lost in ((net(), False), (empty, True)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = fabric.setup_module(module)
        before = [p.detach().clone() for p in module.parameters() if p.numel()]
        fabric.backward(model(X).pow(2).mean())
        if lost:
            with pytest.raises(UsageError, match="setup removed from the model"):
                optimizer.step()
            continue
        optimizer.step()  # it holds the very parameters of this stage
        after = [p for p in module.parameters() if p.numel()]
        assert not any([torch.equal(*pair) for pair in zip(before, after, strict=True)])
        with pytest.raises(UsageError, match="only this stage's part"):
            optimizer.state_dict()


def test_an_optimizer_that_was_forgotten_in_setup_trains_or_says_so(ranks):
    ranks.run(forgotten_in_setup, world_size=2)


def test_states_taken_from_raw_objects_are_refused(ranks, tmp_path):
    ranks.run(taken_from_raw_objects, str(tmp_path / "saved.pt"), world_size=2)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    plain = net()
    optimizer = torch.optim.Adam(plain.parameters())
    plain.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert len(optimizer.state) == 5
