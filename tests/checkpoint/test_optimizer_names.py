"""States of optimizers go by the names of parameters: in any order, and never to others by their number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


class Net(nn.Module):
    """Equal shapes everywhere: a number in place of a name would find a state that fits."""

    def __init__(self, seed=0, names="abc"):
        super().__init__()
        torch.manual_seed(seed)
        for name in names:
            setattr(self, name, nn.Linear(3, 3))

    def forward(self, x):
        for layer in self.children():
            x = layer(x).tanh()
        return x


def reverse(module):
    return list(module.parameters())[::-1]


def decayed(module):
    """The usual two groups: weights decay, biases do not."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.01},
    ]


def in_order(module):
    return module.parameters()


def step(fabric, model, optimizer):
    optimizer.zero_grad()
    fabric.backward(model(torch.arange(6.0).view(2, 3)).pow(2).sum())
    optimizer.step()


def made(fabric, params=in_order, seed=0, steps=1, kind=torch.optim.Adam, **kwargs):
    module = Net(seed)
    model, optimizer = fabric.setup(module, kind(params(module), lr=0.1, **kwargs))
    for _ in range(steps):
        step(fabric, model, optimizer)
    return model, optimizer


def moments(model, optimizer):
    held = optimizer.optimizer.state
    return {name: held[p]["exp_avg"].tolist() for name, p in model.named_parameters() if p in held}


@pytest.mark.parametrize("params", [reverse, decayed])
def test_a_file_has_the_names_of_an_optimizers_parameters_beside_what_torch_reads(fabric, path, params):
    model, optimizer = made(fabric, params)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    saved = torch.load(path, weights_only=True)["optimizer"]
    names = {id(p): name for name, p in model.named_parameters()}
    expected = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert saved.pop("param_names") == expected
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
    twin = Net()
    plain = torch.optim.Adam(params(twin), lr=1.0)
    plain.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert plain.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert {name: plain.state[p]["exp_avg"].tolist() for name, p in twin.named_parameters()} == moments(
        model, optimizer
    )


def test_states_go_by_name_whatever_the_order(fabric, path):
    model, optimizer = made(fabric)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, reverse, seed=1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)
    assert "param_names" not in second.param_groups[0], "add_param_group would ask for more of them"
    for pair in ((model, optimizer), (other, second)):
        step(fabric, *pair)
    assert [p.tolist() for p in other.parameters()] == [p.tolist() for p in model.parameters()]


def shuffled(module):
    groups = decayed(module)
    for group in groups:
        group["params"].reverse()
    return groups


def test_settings_belong_to_groups_of_the_same_names(fabric, path):
    model, optimizer = made(fabric, decayed)
    optimizer.param_groups[1]["lr"] = 0.5
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, shuffled, seed=1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert [group["lr"] for group in second.param_groups] == [0.02, 0.5]
    assert moments(other, second) == moments(model, optimizer)


@pytest.mark.parametrize(
    ("params", "where"),
    [
        (lambda m: decayed(m)[::-1], "'a.bias' is in group 0, and was in group 1"),
        (in_order, "'a.bias' is in group 0, and was in group 1"),
    ],
)
def test_other_groups_are_an_error_or_keep_their_settings(fabric, path, params, where):
    model, optimizer = made(fabric, decayed)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, params, seed=1)
    before = moments(other, second), [{**group, "params": 0} for group in second.param_groups]
    with pytest.raises(UsageError, match=rf"of state\['optimizer'\] has other groups.*{where}"):
        fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == before[0]
    fabric.load(path, {"model": other, "optimizer": second}, strict=False)
    assert moments(other, second) == moments(model, optimizer)
    assert [{**group, "params": 0} for group in second.param_groups] == before[1]


def test_a_group_more_that_is_empty_is_another_grouping(fabric, path):
    model, optimizer = made(fabric, decayed)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, lambda m: [*decayed(m), {"params": []}])
    with pytest.raises(UsageError, match="It has 2 groups, and here are 3"):
        fabric.load(path, {"model": other, "optimizer": second})


def test_other_parameters_are_an_error_with_names(fabric, path):
    model, optimizer = made(fabric)
    fabric.save(path, {"optimizer": optimizer, "model": model})
    module = Net(1, names=["a", "b", "cc"])
    other, second = fabric.setup(module, torch.optim.Adam(module.parameters()))
    with pytest.raises(UsageError) as raised:
        fabric.load(path, {"optimizer": second})
    assert "of state['optimizer'] has other parameters. It has no" in str(raised.value)
    assert "has no 'cc.weight', 'cc.bias' of" in str(raised.value)
    assert "It has 'c.weight', 'c.bias', which" in str(raised.value)
    assert "Did you mean 'cc.weight'" in str(raised.value)
    assert not second.state
    with pytest.warns(UserWarning, match=r"4 of 6 states .* do not match 'c.weight', 'c.bias'"):
        fabric.load(path, {"optimizer": second}, strict=False)
    expected = moments(model, optimizer)
    assert moments(other, second) == {n: expected[n] for n in ("a.weight", "a.bias", "b.weight", "b.bias")}


def test_frozen_parameters_that_an_optimizer_leaves_out_have_no_state_there(fabric, path):
    def trained(module):
        return [p for name, p in module.named_parameters() if not name.startswith("b")]

    model, optimizer = made(fabric, trained)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, lambda module: trained(module)[::-1], seed=1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert list(moments(model, optimizer)) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    assert moments(other, second) == moments(model, optimizer)


# which module names a parameter


def test_the_model_need_not_be_saved_with_its_optimizer(fabric, path):
    model, optimizer = made(fabric)
    fabric.save(path, {"optimizer": optimizer})
    other, second = made(fabric, reverse, seed=1)
    with pytest.warns(match="1 of 2 entries of state loaded .* no 'model': unchanged"):
        fabric.load(path, {"model": other, "optimizer": second}, strict=False)
    assert moments(other, second) == moments(model, optimizer)


def test_a_part_of_the_model_in_the_state_changes_no_names(fabric, path):
    model, optimizer = made(fabric)
    fabric.save(path, {"part": model.a, "model": model, "optimizer": optimizer})
    other, second = made(fabric, reverse, seed=1)
    fabric.load(path, {"optimizer": second})
    assert moments(other, second) == moments(model, optimizer)


def test_a_compiled_model_has_the_same_names(fabric, path):
    model, optimizer = made(fabric)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    module = torch.compile(Net(1), backend="eager")
    module.a = torch.compile(module.a, backend="eager")
    other, second = fabric.setup(module, torch.optim.Adam(reverse(module)))
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)


def two(fabric, params, seed=0):
    nets = [fabric.setup(Net(seed + n)) for n in range(2)]
    optimizer = fabric.setup_optimizers(torch.optim.Adam(params(nets), lr=0.1))
    for factor, net in enumerate(nets, start=1):
        fabric.backward(factor * net(torch.ones(2, 3)).sum())
    optimizer.step()
    return nets, optimizer


def test_models_with_equal_names_are_told_apart_by_their_place_in_the_state(fabric, path):
    nets, optimizer = two(fabric, lambda nets: [p for net in nets for p in net.parameters()])
    fabric.save(path, {"nets": {"g": nets[0], "d": nets[1]}, "optimizer": optimizer})
    saved = torch.load(path, weights_only=True)
    names = saved["optimizer"]["param_names"][0]
    assert names[0] == "nets.g.a.weight"
    assert names[-1] == "nets.d.c.bias"
    others, second = two(fabric, lambda nets: [p for net in nets[::-1] for p in net.parameters()], seed=5)
    fabric.load(path, {"nets": {"g": others[0], "d": others[1]}, "optimizer": second})
    for other, net in zip(others, nets, strict=True):
        assert moments(other, second) == moments(net, optimizer)


def test_models_with_equal_names_and_optimizers_of_their_own(fabric, path):
    pairs = [made(fabric, seed=n) for n in range(2)]
    state = {f"{what}{n}": one for n, pair in enumerate(pairs) for what, one in zip("mo", pair, strict=True)}
    fabric.save(path, state)
    assert torch.load(path)["o1"]["param_names"][0][0] == "a.weight"
    others = [made(fabric, reverse, seed=n) for n in (7, 8)]
    fabric.load(
        path, {f"{what}{n}": o for n, pair in enumerate(others) for what, o in zip("mo", pair, strict=True)}
    )
    assert [moments(*pair) for pair in others] == [moments(*pair) for pair in pairs]


def test_tied_weights_have_the_first_of_their_names(fabric, path):
    def tied(order, seed):
        module = Net(seed)
        module.c.weight = module.a.weight
        model, optimizer = fabric.setup(module, torch.optim.Adam(order(module)))
        step(fabric, model, optimizer)
        return model, optimizer

    model, optimizer = tied(in_order, 0)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    names = torch.load(path)["optimizer"]["param_names"][0]
    assert names == ["a.weight", "a.bias", "b.weight", "b.bias", "c.bias"]
    other, second = tied(reverse, 1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)


# where there are no names


def test_parameters_of_no_module_go_by_number_as_in_torch(fabric, path):
    def bare(seed):
        module = Net(seed)
        extra = nn.Parameter(torch.ones(()))
        model, optimizer = fabric.setup(module, torch.optim.Adam([*module.parameters()]))
        optimizer.optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones(())
        step(fabric, model, optimizer)
        return model, optimizer

    model, optimizer = bare(0)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    assert "param_names" not in torch.load(path)["optimizer"]
    other, second = bare(1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)


def test_a_file_without_names_goes_by_number(fabric, path):
    model, optimizer = made(fabric)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    other, second = made(fabric, seed=1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_file_of_torch_alone_with_names_goes_by_them(fabric, path):
    module = Net()
    plain = torch.optim.Adam(Wrapped(torch.compile(module, backend="eager")).named_parameters())  # as DDP's
    module(torch.ones(2, 3)).sum().backward()
    plain.step()
    assert plain.param_groups[0]["param_names"][0] == "module._orig_mod.a.weight"
    torch.save(plain.state_dict(), path)
    other, second = made(fabric, reverse, seed=1)
    fabric.load_raw(path, second)
    expected = {name: plain.state[p]["exp_avg"].tolist() for name, p in module.named_parameters()}
    assert moments(other, second) == expected


def test_names_that_an_optimizer_was_made_with_stay(fabric, path):
    model, optimizer = made(fabric, lambda module: module.named_parameters())
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other, second = made(fabric, lambda module: [*module.named_parameters(prefix="x")][::-1], seed=1)
    fabric.load(path, {"model": other, "optimizer": second})
    assert moments(other, second) == moments(model, optimizer)
    assert second.param_groups[0]["param_names"][0] == "x.c.bias"


def test_lbfgs_has_one_state_of_all_and_keeps_its_order(fabric, path):
    def lbfgs(params, seed=0):
        module = Net(seed)
        model, optimizer = fabric.setup(module, torch.optim.LBFGS(params(module), max_iter=2))

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
        return {"model": model, "optimizer": optimizer}

    fabric.save(path, lbfgs(in_order))
    fabric.load(path, lbfgs(in_order, 1))
    with pytest.raises(UsageError, match="LBFGS joins all of them in one vector"):
        fabric.load(path, lbfgs(reverse, 1))


def test_models_that_are_forgotten_name_nothing(fabric):
    model, optimizer = made(fabric)
    assert list(fabric.strategy.modules) == [model.module]
    del model, optimizer
    assert not list(fabric.strategy.modules)
