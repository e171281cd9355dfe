from __future__ import annotations

import collections
import dataclasses
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import fabric.checkpoint.state as state_module
from fabric import Fabric
from fabric.checkpoint.portable import from_portable
from fabric.checkpoint.state import MissingKeysError
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.plugins.io import CheckpointIO


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def values(module):
    return [entry.tolist() for entry in module.state_dict().values()]


def trained(fabric, seed=0):
    """A set-up model and optimizer after one step."""
    module = network(seed)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    return model, optimizer


class Counter:
    """Any object with the two methods."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "where": Path("here"), "array": numpy.arange(2)}

    def load_state_dict(self, state):
        assert isinstance(state["where"], Path)
        assert isinstance(state["array"], numpy.ndarray)
        self.count = state["count"]


# save and load


def test_models_optimizers_schedulers_and_anything_stateful_come_back(fabric, path):
    model, optimizer = trained(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": Counter(7)})

    other, second = trained(fabric, seed=1)
    then = torch.optim.lr_scheduler.StepLR(second, 1)
    counter = Counter()
    state = {"model": other, "optimizer": second, "scheduler": then, "counter": counter}
    assert fabric.load(path, state) == {}
    assert values(other) == values(model)
    assert second.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    moments = [[entry["exp_avg"].tolist() for entry in o.state.values()] for o in (optimizer, second)]
    assert moments[0] == moments[1]
    assert then.last_epoch == 1
    assert counter.count == 7
    assert state["model"] is other
    assert state["counter"] is counter


def test_training_goes_on_as_if_it_had_not_stopped(fabric, path):
    def go_on(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(4, 2)).square().sum())
            optimizer.step()
        return values(model)

    model, optimizer = trained(fabric)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    expected = go_on(model, optimizer)
    model, optimizer = trained(fabric, seed=1)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    assert go_on(model, optimizer) == expected


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "multi": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_come_back(fabric, path, name):
    def rates(scheduler, optimizer, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates(scheduler, optimizer, 3)
    fabric.save(path, {"scheduler": scheduler, "optimizer": optimizer})
    second = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other = SCHEDULERS[name](second)
    fabric.load(path, {"scheduler": other, "optimizer": second})
    assert rates(other, second, 4) == rates(scheduler, optimizer, 4)


def test_plain_torch_reads_the_file_under_the_users_own_keys(fabric, path):
    model, optimizer = trained(fabric)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    plain = torch.load(path, weights_only=True)
    twin = network(1)
    twin.load_state_dict(plain["model"])
    assert values(twin) == values(model)
    torch.optim.Adam(twin.parameters()).load_state_dict(plain["optimizer"])
    assert plain["step"] == 3
    assert plain["model"]._metadata["1"] == {"version": 2}


def test_plain_data_are_replaced_in_state_and_the_rest_is_returned(fabric, path):
    fabric.save(
        path, {"step": 3, "config": {"rate": numpy.float32(0.5), "out": Path("o")}, "more": [1, (2,)]}
    )
    state = {"step": 0, "config": {"gone": 1}}
    rest = fabric.load(path, state)
    assert state == {"step": 3, "config": {"rate": 0.5, "out": Path("o")}}
    assert type(state["config"]["rate"]) is numpy.float32
    assert rest == {"more": [1, (2,)]}


def test_dictionaries_keep_the_default_factory_that_they_have_in_state(fabric, path):
    numbers, lists = collections.defaultdict(int, a=1), collections.defaultdict(list, b=[2])
    fabric.save(path, {"seen": numbers, "by": {"lists": lists}, "rest": 3})
    state = {"seen": collections.defaultdict(int), "by": {"lists": collections.defaultdict(list)}}
    assert fabric.load(path, state) == {"rest": 3}
    state["seen"]["new"] += 1  # a plain dictionary raises KeyError, long after the resume
    state["by"]["lists"]["new"].append(1)
    assert state == {"seen": {"a": 1, "new": 1}, "by": {"lists": {"b": [2], "new": [1]}}}


def test_nested_dictionaries_that_a_new_state_does_not_have_keep_their_factory(fabric, path):
    def new():
        return collections.defaultdict(lambda: collections.defaultdict(int))

    counts = new()
    counts["a"]["x"] += 1
    fabric.save(path, {"counts": counts})
    state = {"counts": new()}
    fabric.load(path, state)
    state["counts"]["a"]["y"] += 1
    state["counts"]["b"]["z"] += 1
    assert state["counts"] == {"a": {"x": 1, "y": 1}, "b": {"z": 1}}


def test_a_factory_of_numbers_is_not_called(fabric, path):
    fabric.save(path, {"ids": collections.defaultdict(int, a=7)})
    drawn = iter(range(3))
    state = {"ids": collections.defaultdict(lambda: next(drawn))}
    fabric.load(path, state)
    assert (state["ids"]["a"], state["ids"]["b"]) == (7, 0)


@pytest.mark.parametrize("state", [None, {}])
def test_without_state_everything_is_returned(fabric, path, state):
    fabric.save(path, {"model": network(), "step": 3})
    everything = fabric.load(path, state)
    assert set(everything) == {"model", "step"}
    network(1).load_state_dict(everything["model"])


def test_objects_are_found_in_containers_and_containers_are_filled_in_place(fabric, path):
    def build(seed):
        nets = [network(seed), network(seed + 1)]
        return {
            "nets": {
                "list": nets,
                "pair": (network(seed + 2), seed),
                "ordered": collections.OrderedDict(c=Counter(seed)),
            }
        }

    saved, state = build(0), build(10)
    fabric.save(path, saved)
    nets, listed = state["nets"], state["nets"]["list"]
    fabric.load(path, state)
    assert state["nets"] is nets
    assert nets["list"] is listed
    assert [values(net) for net in listed] == [values(net) for net in saved["nets"]["list"]]
    assert values(nets["pair"][0]) == values(saved["nets"]["pair"][0])
    assert nets["pair"][1] == 0
    assert nets["ordered"]["c"].count == 0


def test_saving_changes_nothing(fabric, path):
    config = {"out": Path("o"), "rates": [0.1]}
    ema = network().state_dict()
    state = {"model": network(), "config": config, "ema": ema}
    fabric.save(
        path, state, filter={"config": lambda name, value: name == "rates", "ema": lambda n, v: False}
    )
    assert config == {"out": Path("o"), "rates": [0.1]}
    assert state["ema"] is ema
    assert len(ema) == len(network().state_dict())


def test_tensors_that_were_loaded_outlive_a_save_over_their_file(fabric, path):
    class Keeps(nn.Module):
        kept = None

        def get_extra_state(self):
            return torch.ones(1_000_000)

        def set_extra_state(self, state):
            self.kept = state

    fabric.save(path, {"keeps": Keeps(), "ema": torch.ones(1_000_000)})
    keeps, state = Keeps(), {"ema": None}
    fabric.load(path, {"keeps": keeps, **state})
    rest = fabric.load(path)
    path.write_bytes(b"")  # in place, unlike fabric.save: mapped memory would raise SIGBUS now
    assert keeps.kept.sum() == rest["ema"].sum() == rest["keeps"]["_extra_state"].sum() == 1_000_000


def test_loading_before_setup(fabric, path):
    fabric.save(path, {"model": network()})
    with fabric.init_module(empty_init=True):
        module = network(1)
    fabric.load(path, {"model": module})
    assert values(fabric.setup(module)) == values(network())
    torch.save(network().state_dict(), path)
    with fabric.init_module(empty_init=True):
        module = network(1)
    fabric.load_raw(path, module)
    assert values(fabric.setup(module)) == values(network())


# load_raw


def test_bare_state_dicts_are_loaded_raw(fabric, path):
    model, optimizer = trained(fabric)
    other, second = trained(fabric, seed=1)
    torch.save(model.state_dict(), path)
    assert fabric.load_raw(path, other) is None
    assert values(other) == values(model)
    torch.save(optimizer.state_dict(), path)
    fabric.load_raw(path, second)
    assert len(second.state) == len(optimizer.state)
    counter = Counter()
    fabric.save(path, Counter(5).state_dict())
    fabric.load_raw(path, counter)
    assert counter.count == 5


def test_load_raw_is_strict_unless_told_otherwise(fabric, path):
    state = network().state_dict()
    del state["0.weight"]
    torch.save(state, path)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0.weight\""):
        fabric.load_raw(path, network())
    module = network(1)
    with pytest.warns(match=r"8 of 9 tensors of Sequential loaded"):
        fabric.load_raw(path, module, strict=False)
    assert module[2].bias.tolist() == network()[2].bias.tolist()


def test_load_raw_refuses_what_it_cannot_load_into(fabric, path):
    torch.save(network().state_dict(), path)
    with pytest.raises(TypeError) as caught:
        fabric.load_raw(path, 3)
    assert str(caught.value) == (
        "fabric.load_raw(path, obj) needs a model, an optimizer or another object with load_state_dict(), "
        "but got int. Write data = fabric.load(path) to read plain data."
    )
    with pytest.raises(TypeError, match=r"but got a dict\. Write fabric\.load"):
        fabric.load_raw(path, {"model": network()})


# filter


def test_a_filter_chooses_entries(fabric, path):
    model, optimizer = trained(fabric)
    seen = []
    filters = {
        "model": lambda name, value: seen.append((name, type(value))) or name.startswith("2."),
        "optimizer": lambda name, value: name == "param_groups",
        "config": lambda name, value: value > 1,
    }
    fabric.save(
        path, {"model": model, "optimizer": optimizer, "config": {"a": 1, "b": 2}, "step": 1}, filters
    )
    saved = torch.load(path, weights_only=True)
    assert list(saved["model"]) == ["2.weight", "2.bias"]
    assert saved["model"]._metadata["1"] == {"version": 2}
    assert list(saved["optimizer"]) == ["param_groups"]
    assert saved["config"] == {"b": 2}
    assert saved["step"] == 1
    assert ("0.weight", torch.Tensor) in seen


@pytest.mark.parametrize(
    ("filter", "kind", "text"),
    [
        ({"modle": print}, KeyError, "filter has 'modle', but state has only 'model', 'step'."),
        (
            {"model": "head"},
            TypeError,
            "filter['model'] must be a function (name, value) -> bool, and state['model'] have names, but "
            "they are str and ",
        ),
        (
            {"step": print},
            TypeError,
            "filter['step'] must be a function (name, value) -> bool, and state['step'] have names, but they "
            "are builtin_function_or_method and int.",
        ),
        (
            print,
            TypeError,
            "fabric.save(filter=...) needs a dictionary of functions, but got a builtin_function",
        ),
    ],
)
def test_bad_filters(fabric, path, filter, kind, text):
    with pytest.raises(kind) as caught:
        fabric.save(path, {"model": network(), "step": 1}, filter=filter)
    assert str(caught.value).startswith(text)
    assert not path.exists()


# strict


def test_strict_names_what_the_file_lacks(fabric, path):
    fabric.save(path, {"model": network(), "step": 3})
    with pytest.raises(KeyError) as caught:
        fabric.load(path, {"model": network(), "epoch": 0, "rate": 0})
    assert isinstance(caught.value, MissingKeysError | ConfigurationError)
    assert str(caught.value) == (
        "The checkpoint has no 'epoch', 'rate' for state; it has 'model', 'step'. Remove the missing keys "
        "from state, or pass strict=False."
    )
    state = {"epoch": 0, "step": 0}
    with pytest.warns(match="1 of 2 entries of state loaded"):
        fabric.load(path, state, strict=False)
    assert state == {"epoch": 0, "step": 3}


def test_strict_reaches_into_containers(fabric, path):
    fabric.save(path, {"nets": {"a": network()}})
    nets = {"a": network(1), "b": network(2)}
    with pytest.raises(KeyError, match=r"has no 'b' for state\['nets'\]; it has 'a'"):
        fabric.load(path, {"nets": nets})
    with pytest.warns(match=r"1 of 2 entries of state\['nets'\] loaded .* no 'b': unchanged"):
        fabric.load(path, {"nets": nets}, strict=False)
    assert values(nets["a"]) == values(network())
    assert values(nets["b"]) == values(network(2)), "what the file lacks stays as it is"


def test_strict_reaches_into_models(fabric, path):
    fabric.save(path, {"model": nn.Linear(2, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        fabric.load(path, {"model": network()})
    other = nn.ModuleDict({"other": nn.Linear(1, 1), "weight": nn.Linear(1, 1)})
    other.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.warns(match=r"1 of 3 tensors of ModuleDict .* no 'bias': not loaded"):
        fabric.load(path, {"model": other}, strict=False)
    assert other.weight.abs().sum() > 0


@pytest.mark.parametrize("strict", [True, False])
def test_a_bare_state_dict_is_told_apart_from_a_checkpoint(fabric, path, strict):
    module, saved = network(1), network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    text = r"The checkpoint has no 'NAME' for state; it has .*, and looks like a bare state_dict\. "
    for name, target, state in (
        ("model", module, saved.state_dict()),
        ("optimizer", optimizer, torch.optim.SGD(saved.parameters(), lr=2.0).state_dict()),
    ):
        torch.save(state, path)
        says = text.replace("NAME", name) + rf"Write fabric\.load_raw\(path, {name}\)\."
        caught = (
            pytest.raises(KeyError, match=says) if strict else pytest.warns(match=f"loaded nothing. {says}")
        )
        with caught:
            fabric.load(path, {name: target}, strict)
        fabric.load_raw(path, target)  # as the text says
    assert values(module) == values(saved)
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_names_that_are_not_in_the_checkpoint_are_told(fabric, path):
    module = network(1)
    fabric.save(path, {"net": network(), "step": 1})
    text = "no 'model' for state; it has 'net', 'step'. Give the objects under the names that the checkpoint"
    with pytest.raises(KeyError, match=text):
        fabric.load(path, {"model": module})
    with pytest.warns(match=f"loaded nothing. The checkpoint has {text}"):
        fabric.load(path, {"model": module}, strict=False)
    with pytest.warns(match=r"0 of 8 tensors loaded\. .*\('net', ...\) are none .*\{'net': model\}\)\."):
        fabric.load_raw(path, module, strict=False)
    with pytest.warns(
        match=r"0 of 2 tensors .*\('0.weight', ...\) .* \('weight', ...\). Write 'weight' for '0"
    ):
        fabric.load(path, {"net": nn.Linear(2, 3)}, strict=False)
    model = fabric.setup(module)
    with pytest.warns(match="0 of 8 tensors loaded") as caught:
        model.load_state_dict({"other.weight": torch.zeros(1)}, strict=False)
    assert caught[0].filename == __file__
    assert values(module) == values(network(1))


def test_containers_that_do_not_fit_are_errors_and_never_replaced(fabric, path):
    fabric.save(path, {"nets": [network()], "net": 3})
    with pytest.raises(UsageError, match=r"holds 1 entries where state\['nets'\] has 2"):
        fabric.load(path, {"nets": [network(), network()]})
    with pytest.raises(UsageError, match=r"holds a list where state\['nets'\] is a dictionary"):
        fabric.load(path, {"nets": {"a": network()}})
    with pytest.raises(UsageError, match=r"holds a int where state\['net'\] has 1"):
        fabric.load(path, {"net": [network()]})
    with pytest.raises(UsageError, match=r"holds a int where state\['net'\] is a module"):
        fabric.load(path, {"net": network()})
    torch.save([1], path)
    with pytest.raises(UsageError, match=r"holds a list where state is a dictionary"):
        fabric.load(path, {"net": network()})
    assert fabric.load(path) == [1]


# what cannot be saved


@dataclasses.dataclass
class Config:
    rate: float = 0.1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (Config(), "state['config'] is a test_state.Config"),
        ([1, {"deep": [lambda: 0]}], "state['config'][1]['deep'][0] is a builtins.function"),
        (collections.namedtuple("P", "x")(1), "Save state['config']._asdict()."),
        (nn.Linear, "state['config'] is a builtins.type"),
    ],
)
def test_what_would_not_load_is_refused_and_the_old_file_stays(fabric, path, value, place):
    fabric.save(path, {"step": 1})
    with pytest.raises(TypeError) as caught:
        fabric.save(path, {"config": value})
    assert place in str(caught.value)
    assert fabric.load(path) == {"step": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["a.pt"]


def test_names_of_state_are_checked_too(fabric, path):
    with pytest.raises(TypeError, match=r"^state holds the key .*Path"):
        fabric.save(path, {Path("model"): 1})


@pytest.mark.parametrize("state", [network(), [1], None])
def test_state_must_be_a_dictionary(fabric, path, state):
    with pytest.raises(ArgumentTypeError, match="needs a dictionary, but state is a "):
        fabric.save(path, state)


def test_a_stateful_object_behind_a_wrapper_is_asked_through_it(fabric, path):
    class Proxy:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    fabric.save(path, {"proxy": Proxy(Counter(4))})
    counter = Counter()
    fabric.load(path, {"proxy": Proxy(counter)})
    assert counter.count == 4


# other storage


class Shelf(CheckpointIO):
    """Keeps everything in memory, and hands out what it keeps."""

    def __init__(self):
        self.kept = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.kept[str(path)] = checkpoint

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return self.kept[str(path)]

    def remove_checkpoint(self, path):
        del self.kept[str(path)]


def test_a_checkpoint_io_of_the_users_own_is_used_and_its_data_are_not_changed():
    shelf = Shelf()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=shelf)
    fabric.save("here", {"model": network(), "nested": {"where": Path("p")}, "step": 1})
    for _ in range(2):
        module = network(1)
        rest = fabric.load("here", {"model": module})
        assert values(module) == values(network())
        assert rest == {"nested": {"where": Path("p")}, "step": 1}


def test_old_and_new_states_of_an_optimizer_are_never_both_in_memory(fabric, path, monkeypatch):
    model, optimizer = trained(fabric)
    fabric.save(path, {"optimizer": optimizer})
    expected = [entry["exp_avg"].tolist() for entry in optimizer.state.values()]
    fabric.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    old = [weakref.ref(entry["exp_avg"]) for entry in optimizer.state.values()]
    alive = []

    def watched(data, stored=False):
        if isinstance(data, dict) and "exp_avg" in data:
            alive.append(sum(ref() is not None for ref in old))
        return from_portable(data, stored)

    monkeypatch.setattr(state_module, "from_portable", watched)
    fabric.load(path, {"optimizer": optimizer})
    assert alive == [5, 4, 3, 2, 1, 0]
    assert [entry["exp_avg"].tolist() for entry in optimizer.state.values()] == expected


def test_an_optimizer_that_a_state_does_not_fit_stays_as_it_was(fabric, path):
    _, optimizer = trained(fabric)
    other = torch.optim.Adam([nn.Parameter(torch.ones(1)) for _ in range(5)])
    fabric.save(path, {"optimizer": other})
    before = [entry["exp_avg"].tolist() for entry in optimizer.state.values()]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        fabric.load(path, {"optimizer": optimizer})
    assert [entry["exp_avg"].tolist() for entry in optimizer.state.values()] == before
