"""Which parameter a saved state is of, where the names in the file are not quite those of here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def fabric():
    return Fabric(accelerator="cpu", devices=1)


def layers(*names, seed=0, **kwargs):
    """Layers of equal shapes: a state of another one would fit."""
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(3, 3, **kwargs) for name in names})


class Step(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def trained(*modules, kind=torch.optim.Adam, **kwargs):
    """An optimizer, each state of which is another."""
    parameters = list(dict.fromkeys([p for module in modules for p in module.parameters()]))
    optimizer = kind(parameters, **kwargs)
    for number, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    return optimizer


def fresh(*modules, reverse=True):
    """One that has its parameters in another order, and no states."""
    parameters = list(dict.fromkeys([p for module in modules for p in module.parameters()]))
    return torch.optim.Adam(parameters[::-1] if reverse else parameters)


def moments(optimizer, module):
    optimizer = getattr(optimizer, "optimizer", optimizer)
    held = module.named_parameters(remove_duplicate=False)
    return {name: optimizer.state[p]["exp_avg"].tolist() for name, p in held if p in optimizer.state}


# a prefix that all names have, there or here


def save_step(path):
    """Set up in a wrapper, saved without it."""
    net = layers("a", "b")
    optimizer = trained(net)
    fab = fabric()
    _, wrapped = fab.setup(Step(net), optimizer)
    fab.save(path, {"net": net, "optimizer": wrapped})
    return moments(optimizer, net)


def test_a_file_of_a_wrapped_model_loads_before_setup_and_into_the_model_alone(path):
    expected = save_step(path)
    net = layers("a", "b")
    optimizer = fresh(net)
    fabric().load(path, {"net": net, "optimizer": optimizer})
    assert moments(optimizer, net) == expected
    net = layers("a", "b")
    fab = fabric()
    _, optimizer = fab.setup(net, fresh(net))
    fab.load(path, {"optimizer": optimizer})
    assert moments(optimizer, net) == expected


def test_a_file_of_a_model_loads_into_the_wrapped_one(path):
    net = layers("a", "b")
    optimizer = trained(net)
    fabric().save(path, {"net": net, "optimizer": optimizer})
    other = layers("a", "b")
    fab = fabric()
    _, second = fab.setup(Step(other), fresh(other))
    fab.load(path, {"optimizer": second})
    assert moments(second, other) == moments(optimizer, net)


def test_a_file_of_a_model_loads_into_its_part(path):
    model = Step(layers("a", "b"))
    optimizer = trained(model.net)
    fabric().save(path, {"net": model.net, "model": model, "optimizer": optimizer})
    other = layers("a", "b")
    second = fresh(other)
    fabric().load(path, {"net": other, "optimizer": second})
    assert moments(second, other) == moments(optimizer, model.net)


def test_a_joint_optimizer_finds_its_models_at_another_place(path):
    g, d = layers("a"), layers("a")
    optimizer = trained(g, d)
    fabric().save(path, {"nets": {"g": g, "d": d}, "optimizer": optimizer})
    others = layers("a"), layers("a")
    second = fresh(*others)
    nets = {"nets": torch.load(path)["nets"], "g": others[0], "d": others[1]}
    with pytest.warns(match="2 of 4 entries of state loaded .* no 'g', 'd': unchanged"):
        fabric().load(path, {**nets, "optimizer": second}, strict=False)
    assert [moments(second, other) for other in others] == [moments(optimizer, net) for net in (g, d)]


def test_a_like_part_of_the_model_is_another_one(path):
    model = layers("a", "b")
    fabric().save(path, {"model": model, "optimizer": trained(model["a"])})
    optimizer = fresh(model["b"])
    with pytest.raises(
        UsageError, match=r"It has no 'b.bias', 'b.weight' of this optimizer. It has 'a.weight'"
    ):
        fabric().load(path, {"model": model, "optimizer": optimizer})


# strict=False says what it has left


def test_what_found_no_place_is_told(path):
    net = layers("a", "b")
    optimizer = trained(net)
    fabric().save(path, {"net": net, "optimizer": optimizer})
    other = layers("a", "c")
    second = fresh(other)
    text = r"2 of 4 states were loaded into state\['optimizer'\].*do not match 'b.weight', 'b.bias'"
    with pytest.warns(UserWarning, match=text), pytest.warns(match="2 of 4 tensors of ModuleDict"):
        fabric().load(path, {"optimizer": second, "net": other}, strict=False)
    assert list(moments(second, other)) == ["a.weight", "a.bias"]
    third = layers("x")
    with pytest.warns(match="0 of 4 states"), pytest.warns(match="0 of 2 tensors"):
        fabric().load(path, {"net": third, "optimizer": fresh(third)}, strict=False)
    more = layers("a", "b", "c")
    with pytest.warns(match="4 of 6 tensors of ") as caught:
        fabric().load(path, {"net": more, "optimizer": fresh(more)}, strict=False)
    assert len(caught) == 1, "all states of the file were loaded"


# the names in the file are not the optimizer's


def test_plain_torch_reads_no_names_and_layers_are_thawed_after(path):
    net = layers("a", "b")
    fabric().save(path, {"net": net, "optimizer": trained(net["b"])})
    other = layers("a", "b")
    for load in (
        lambda optimizer: optimizer.load_state_dict(torch.load(path)["optimizer"]),
        lambda optimizer: fabric().load(path, {"optimizer": optimizer}),
    ):
        optimizer = fresh(other["b"], reverse=False)
        load(optimizer)
        optimizer.add_param_group({"params": list(other["a"].parameters())})
        assert all(["param_names" not in group for group in optimizer.param_groups])


def test_names_of_a_file_are_not_written_again(path):
    old = layers("a", "b")
    optimizer = trained(old)
    fabric().save(path, {"net": old, "optimizer": optimizer})
    new = layers("b", "a")  # the same network, where a is called b
    second = fresh(new, reverse=False)
    fabric().load(path, {"optimizer": second})
    assert list(moments(second, new).values()) == list(moments(optimizer, old).values())
    fabric().save(path, {"optimizer": second})
    assert "param_names" not in str(torch.load(path)["optimizer"])


def test_names_that_torch_has_written_into_groups_stay_in_the_file(path):
    net = layers("a")
    optimizer = torch.optim.Adam(net.named_parameters())
    torch.save(optimizer.state_dict(), path)
    nameless = fresh(net)
    fabric().load_raw(path, nameless)
    assert "param_names" not in nameless.param_groups[0]
    fabric().save(path, {"net": net, "optimizer": optimizer})
    saved = torch.load(path)["optimizer"]
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
    assert saved["param_names"] == [["a.weight", "a.bias"]]


class Strict(torch.optim.SGD):
    """Has a way of its own to load."""

    def load_state_dict(self, state_dict):
        assert {*state_dict} == {"state", "param_groups"}
        super().load_state_dict(state_dict)


def test_an_optimizers_own_load_sees_no_names(path):
    net = layers("a")
    fabric().save(path, {"net": net, "optimizer": trained(net, kind=Strict)})
    fabric().load(path, {"net": net, "optimizer": Strict(net.parameters())})
    fabric().load(path, {"optimizer": Strict(net.parameters())})


# all names of a parameter


def tied(*names):
    net = layers(*names, bias=False)
    net["head"].weight = net["emb"].weight
    return net


@pytest.mark.parametrize("order", [("emb", "head", "x"), ("x", "head", "emb")])
def test_a_tied_weight_is_found_by_any_of_its_names(path, order):
    net = tied("emb", "x", "head")
    optimizer = trained(net)
    fabric().save(path, {"net": net, "optimizer": optimizer})
    other = tied(*order)
    second = fresh(other)
    fabric().load(path, {"net": other, "optimizer": second})
    assert moments(second, other) == moments(optimizer, net)


def test_a_weight_that_is_tied_here_only_is_an_error(path):
    net = layers("emb", "head", bias=False)
    fabric().save(path, {"net": net, "optimizer": trained(net)})
    for order in (("emb", "head"), ("head", "emb")):
        other = tied(*order)
        with pytest.raises(UsageError, match=f"It has '{order[1]}.weight', which this one has not"):
            fabric().load(path, {"net": other, "optimizer": fresh(other)})
    fabric().save(path, {"net": other, "optimizer": trained(other)})
    with pytest.raises(UsageError, match=r"It has no 'emb.weight' of this"):
        fabric().load(path, {"net": net, "optimizer": fresh(net)})


def test_models_that_share_a_part_in_another_order_of_the_state(path):
    def make():
        shared = layers("a")
        return {name: nn.ModuleDict({"enc": shared, "head": layers("h")}) for name in ("one", "two")}

    tasks = make()
    optimizer = trained(*tasks.values())
    fabric().save(path, {**tasks, "optimizer": optimizer})
    others = make()
    second = fresh(*others.values())
    fabric().load(path, {"two": others["two"], "one": others["one"], "optimizer": second})
    for name in tasks:
        assert moments(second, others[name]) == moments(optimizer, tasks[name])


# shapes


def heads(width, kind=torch.optim.Adam, **kwargs):
    net = nn.ModuleDict({"body": nn.Linear(6, 6), "head": nn.Linear(6, width)})
    return net, trained(net, kind=kind, **kwargs)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (torch.optim.Adam, "exp_avg"),
        (torch.optim.Adagrad, "sum"),
        (lambda params: torch.optim.SGD(params, momentum=0.9), "momentum_buffer"),
    ],
)
def test_states_of_another_shape(path, kind, key, named):
    net, optimizer = heads(10, kind)
    fabric().save(path, {"net": net, "optimizer": optimizer})
    net, optimizer = heads(3, kind)
    before = copy.deepcopy(optimizer.state_dict())
    fab = fabric()
    if named:
        fab.setup_module(net)
    name = "head.weight" if named else "parameter 2"
    text = rf"'{key}' of {name} has shape \[10, 6\] in the checkpoint and \[3, 6\] in the model"
    with pytest.raises(UsageError, match=text):
        fab.load(path, {"optimizer": optimizer})
    torch.testing.assert_close(optimizer.state_dict(), before)
    with pytest.warns(UserWarning, match=f"2 of 4 states .*{name}"):
        fab.load(path, {"optimizer": optimizer}, strict=False)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    "kind", [torch.optim.Adafactor, torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop]
)
def test_states_that_have_a_shape_of_their_own_are_loaded(path, kind):
    net, optimizer = heads(3, kind)
    fabric().save(path, {"net": net, "optimizer": optimizer})
    other, second = heads(3, kind)
    fabric().load(path, {"net": other, "optimizer": second})
    torch.testing.assert_close(second.state_dict(), optimizer.state_dict(), atol=0, rtol=0)


# no state of an optimizer


def test_what_is_no_optimizers_state_is_told(path, tmp_path):
    net = layers("a")
    optimizer = trained(net)
    fabric().save(path, {"net": net, "adam": optimizer})
    with pytest.raises(UsageError, match=r"'net', 'adam' where the object to load.*\{\"name\": optimizer\}"):
        fabric().load_raw(path, optimizer)
    text = r"'a.weight', 'a.bias' where state\['net'\] is an optimizer \(Adam\)"
    with pytest.raises(UsageError, match=text):
        fabric().load(path, {"net": optimizer})
    torch.save({"optimizer": 3}, tmp_path / "b.pt")
    with pytest.raises(UsageError, match=r"a int where state\['optimizer'\]"):
        fabric().load(tmp_path / "b.pt", {"optimizer": optimizer})


def test_a_safetensors_file_has_no_optimizer(tmp_path):
    pytest.importorskip("safetensors")
    net = layers("a")
    file = tmp_path / "m.safetensors"
    fabric().save(file, {"model": net})
    for load in (
        lambda optimizer: fabric().load(file, {"optimizer": optimizer}),
        lambda optimizer: fabric().load_raw(file, optimizer),
    ):
        with pytest.raises(UsageError, match=r"'a.bias', 'a.weight' where .* is an optimizer"):
            load(fresh(net))


def test_groups_in_another_order_say_so(path):
    def grouped(net, names):
        return torch.optim.Adam([{"params": list(net[name].parameters())} for name in names])

    net = layers("a", "b")
    fabric().save(path, {"net": net, "optimizer": grouped(net, "ab")})
    with pytest.raises(UsageError, match=r"has other groups.* is in group 0, and was in group 1"):
        fabric().load(path, {"net": net, "optimizer": grouped(net, "ba")})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("format", ["full", "sharded"])
def test_an_optimizer_of_another_class(path, strict, format):
    net = layers("a")
    fabric().save(path, {"net": net, "optimizer": trained(net)}, format=format)
    other = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    text = r"of state\['optimizer'\] is of another optimizer than SGD. It has 'betas', .* no 'momentum'"
    with pytest.raises(UsageError, match=text):
        fabric().load(path, {"optimizer": other}, strict=strict)
    assert other.param_groups[0]["lr"] == 0.1


def test_a_file_of_an_older_torch_lacks_switches(path):
    net = layers("a")
    saved = trained(net).state_dict()
    for key in ("decoupled_weight_decay", "foreach", "fused", "maximize"):
        del saved["param_groups"][0][key]
    torch.save({"optimizer": saved}, path)
    optimizer = fresh(net, reverse=False)
    fabric().load(path, {"optimizer": optimizer})
    assert len(moments(optimizer, net)) == 2
