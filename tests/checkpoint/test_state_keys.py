"""State dicts under the keys of another wrapping: raw DDP, torch.compile, a training class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.utilities.state_keys import clean_keys, fit_keys
from fabric.wrappers import is_wrapped


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def values(module):
    return [entry.tolist() for entry in module.state_dict().values()]


def compiled(module):
    return torch.compile(module, backend="eager")


class Inner(nn.Module):
    """A model of which a part is compiled, or not."""

    def __init__(self, compile=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = compiled(nn.Linear(2, 2)) if compile else nn.Linear(2, 2)
        self.head = nn.BatchNorm1d(2)


FORMS = {
    "plain": lambda seed: Inner(seed=seed),
    "part compiled": lambda seed: Inner(compile=True, seed=seed),
    "compiled": lambda seed: compiled(Inner(seed=seed)),
    "both compiled": lambda seed: compiled(Inner(compile=True, seed=seed)),
    "like DDP": lambda seed: nn.ModuleDict({"module": Inner(seed=seed)}),
    "DDP of compiled": lambda seed: nn.ModuleDict({"module": compiled(Inner(seed=seed))}),
    "compiled DDP": lambda seed: compiled(nn.ModuleDict({"module": Inner(compile=True, seed=seed)})),
    "in a training class": lambda seed: nn.ModuleDict({"model": Inner(seed=seed)}),
}


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_wrapping_loads_into_every_other(fabric, path, source, target):
    torch.save({"model": FORMS[source](0).state_dict()}, path)
    module = FORMS[target](1)
    fabric.load(path, {"model": module})
    assert values(module) == values(Inner(seed=0))


@pytest.mark.parametrize("form", ["plain", "part compiled", "compiled", "both compiled"])
@pytest.mark.parametrize("ready", [False, True])
def test_files_hold_the_users_own_keys(fabric, path, form, ready):
    module = FORMS[form](0)
    model = fabric.setup(module) if ready else module
    assert is_wrapped(model) == ready
    fabric.save(path, {"model": model})
    saved = torch.load(path, weights_only=True)["model"]
    assert list(saved) == list(Inner().state_dict())
    assert saved._metadata["head"] == {"version": 2}
    assert set(saved._metadata) == {"", "body", "head"}


def test_prefixes_are_taken_out_only_where_all_keys_have_them():
    module = nn.Linear(1, 1)
    assert list(fit_keys({"module.weight": 1, "module.bias": 2}, module)) == ["weight", "bias"]
    assert list(fit_keys({"module.weight": 1, "bias": 2}, module)) == ["module.weight", "bias"]
    assert list(fit_keys({"module.model.weight": 1, "module.model.bias": 2}, module)) == ["weight", "bias"]
    assert list(fit_keys({"model.other": 1}, module)) == ["model.other"]


def test_a_child_that_is_really_called_module_keeps_its_name():
    module = nn.ModuleDict({"module": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    state = module.state_dict()
    assert fit_keys(state, module) is state
    assert clean_keys(state) is state


def test_a_module_keeps_its_version(fabric, path):
    class Versioned(nn.Module):
        _version = 2

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def _load_from_state_dict(self, state, prefix, local_metadata, *args):
            self.seen = local_metadata.get("version")
            super()._load_from_state_dict(state, prefix, local_metadata, *args)

    for wrap in (nn.Sequential, lambda m: nn.Sequential(torch.compile(m, backend="eager"))):
        for back in (nn.Sequential, lambda m: nn.Sequential(torch.compile(m, backend="eager"))):
            fabric.save(path, {"model": wrap(Versioned())}, filter={"model": lambda name, value: True})
            fresh = Versioned()
            fabric.load(path, {"model": back(fresh)})
            assert fresh.seen == 2, "the module would convert the new format as if it were the old one"


def test_a_set_up_module_in_another_one_loads_itself(fabric, path):
    """As in torch's AveragedModel(model) of a model that was set up."""

    class Own(nn.Linear):
        steps = 0

        def get_extra_state(self):
            return {"steps": self.steps}

        def set_extra_state(self, state):
            self.steps = state["steps"]

        def _load_from_state_dict(self, state, prefix, *args):
            state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
            super()._load_from_state_dict(state, prefix, *args)

    own = Own(1, 1)
    ema = torch.optim.swa_utils.AveragedModel(fabric.setup(own))
    ema.module.module.steps = 3
    before = ema.module.bias.item()
    fabric.save(path, {"ema": ema})
    ema.module.module.steps = 0
    fabric.load(path, {"ema": ema})
    assert (ema.module.module.steps, ema.module.bias.item()) == (3, before + 1)
