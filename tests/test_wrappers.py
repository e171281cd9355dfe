"""The module wrapper: the user's module in all that can be seen, behind a plan."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

from fabric import Fabric, is_wrapped
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.wrappers import _FabricModule, _unwrap_objects, unwrap

X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.note = "hello"
        self.reads = 0
        self._scale = 1.0

    @property
    def scale(self):
        self.reads += 1
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = value

    @property
    def broken(self):
        raise ValueError("from the property")

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x):
        return self(x).pow(2).mean()

    def two(self, x):
        return self.head(self.body(x)).sum() + self.body(x).sum()

    @torch.no_grad()
    def generate(self, x, steps):
        for _ in range(steps):
            x = self.body(x)
        return x


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 2)

    def forward(self, x):
        return self.module(x)


def fabric_on_cpu(**kwargs):
    return Fabric(accelerator="cpu", devices=1, **kwargs)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def model(net):
    return fabric_on_cpu().setup(net)


# attributes


def test_reads_come_from_the_users_module(model, net):
    assert model.note == "hello"
    assert model.body is net.body
    assert model.head.weight is net.head.weight
    assert model.steps is net.steps
    assert model.module is net


def test_writes_go_to_the_users_module(model, net):
    model.note = "bye"
    model.fresh = [1]
    model.body = new = nn.Linear(4, 4)
    assert net.note == "bye"
    assert net.fresh == [1]
    assert net.body is new
    assert model.body is new
    assert "note" not in model.__dict__


def test_deletes_go_to_the_users_module(model, net):
    del model.note
    del model.head
    assert not hasattr(net, "note")
    assert "head" not in net._modules
    with pytest.raises(AttributeError):
        del model.note


def test_a_propertys_setter_runs_without_its_getter(model, net):
    model.scale = 3.0
    assert (net._scale, net.reads) == (3.0, 0)
    assert model.scale == 3.0
    assert net.reads == 1


def test_errors_in_a_property_are_the_users(model):
    with pytest.raises(ValueError, match="from the property"):
        _ = model.broken


def test_attribute_error_names_the_users_class(model):
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing
    assert not hasattr(model, "nothing")


def test_dir_shows_both(model):
    assert {"note", "scale", "loss", "body", "mark_forward_method", "module"} <= set(dir(model))


def test_an_attribute_named_module():
    net = Held()
    model = fabric_on_cpu().setup(net)
    assert model.module is net
    assert model.module.module is net._modules["module"]
    assert [*model.state_dict()] == ["module.weight", "module.bias"]
    torch.testing.assert_close(model(X), net(X))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    with pytest.raises(UsageError, match=re.escape("Write model.module.module = ")):
        model.module = nn.Linear(4, 2)
    assert model.module is net


def test_a_replaced_forward_keeps_the_plan(net):
    model = fabric_on_cpu(precision="bf16-mixed").setup(net)
    seen = []

    def forward(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return net.body(x)

    model.forward = forward
    assert model(X).shape == (2, 4)
    assert seen == [True]
    del model.forward
    assert model(X).shape == (2, 2)


# names


def test_names_are_the_users_own(model, net):
    for method in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        ours, theirs = dict(getattr(model, method)()), dict(getattr(net, method)())
        assert list(ours) == list(theirs), method
        assert all(ours[name] is theirs[name] for name in theirs), method
    assert list(model.modules()) == list(net.modules())
    assert [name for name, _ in model.named_parameters(prefix="m")] == [
        name for name, _ in net.named_parameters(prefix="m")
    ]
    assert model.get_submodule("body") is net.body
    assert model.get_parameter("head.bias") is net.head.bias


def test_parameter_groups_by_module_name(model):
    """Weight decay by module kind, as it is often written, needs names that fit together."""
    by_module = {
        f"{outer}.{inner}"
        for outer, module in model.named_modules()
        for inner, _ in module.named_parameters(recurse=False)
    }
    assert by_module == {name for name, _ in model.named_parameters()}


def test_state_dict_has_the_users_keys_in_the_users_order(model, net):
    assert list(model.state_dict()) == list(net.state_dict())
    assert list(model.state_dict(prefix="m.")) == list(net.state_dict(prefix="m."))
    assert model.state_dict(keep_vars=True)["body.weight"] is net.body.weight


def test_strict_loading_names_the_users_keys(model):
    state = model.state_dict()
    del state["body.weight"]
    state["odd"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Net.*Unexpected.*"odd".*|"body.weight"'):
        model.load_state_dict(state)
    answer = model.load_state_dict(state, strict=False)
    assert (answer.missing_keys, answer.unexpected_keys) == (["body.weight"], ["odd"])


def test_what_torch_registers_on_the_wrapper_lands_in_the_users_module(model, net):
    model.register_buffer("mean", torch.ones(1))
    model.register_buffer("temporary", torch.ones(1), persistent=False)
    model.register_parameter("gain", nn.Parameter(torch.ones(1)))
    model.add_module("tail", nn.Linear(2, 2))
    assert {"mean", "gain", "tail.weight"} <= set(net.state_dict())
    assert "temporary" not in net.state_dict()
    assert "temporary" in dict(net.named_buffers())
    assert set(model.state_dict()) == set(net.state_dict())


def test_state_dict_hooks_on_the_wrapper_run(model):
    def drop(module, state, prefix, metadata):
        del state["steps"]

    model.register_state_dict_post_hook(drop)
    assert "steps" not in model.state_dict()


# modes and places


def test_train_and_eval_reach_everything(model, net):
    assert model.eval() is model
    assert not (model.training)
    assert not (net.training)
    assert not (net.body.training)
    assert model.train() is model
    assert model.training
    assert net.body.training


def test_a_users_own_train_is_called():
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

    model = fabric_on_cpu().setup(Frozen())
    model.train()
    assert model.training
    assert not model.body.training


def test_a_model_in_evaluation_mode_stays_so(net):
    model = fabric_on_cpu().setup(net.eval())
    assert not model.training


def test_to_changes_in_place_and_returns_the_wrapper(model, net):
    weight = net.body.weight
    assert model.to(torch.float64) is model
    assert net.body.weight is weight
    assert weight.dtype is torch.float64
    assert net.steps.dtype is torch.float64
    assert model.float() is model
    assert weight.dtype is torch.float32
    assert model.requires_grad_(False) is model
    assert not weight.requires_grad


def test_apply_visits_the_users_modules_once(model, net):
    visited = []
    assert model.apply(visited.append) is model
    assert visited == [net.body, net.head, net]


def test_zero_grad(model, net):
    model(X).sum().backward()
    model.zero_grad()
    assert net.body.weight.grad is None


# copies


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_independent_and_work(net, precision, duplicate):
    model = fabric_on_cpu(precision=precision).setup(net)
    twin = duplicate(model)
    assert type(twin) is type(model)
    torch.testing.assert_close(twin(X), model(X), rtol=0, atol=0)
    assert twin(X).dtype == model(X).dtype
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.fill_(7)
    assert model.head.weight.abs().sum() > 0
    assert (twin(X) == 7).all()
    twin.register_buffer("extra", torch.ones(1))
    assert "extra" in twin.module.state_dict()
    assert "extra" not in net.state_dict()


def test_a_deepcopy_trains_under_a_scaler(net):
    fabric = fabric_on_cpu(precision="16-mixed")
    twin = copy.deepcopy(fabric.setup(net))
    fabric.backward(twin(X).sum())
    assert twin.body.weight.grad is not None
    with pytest.raises(UsageError, match=r"fabric\.backward"):
        twin(X).sum().backward()


def test_torch_save_of_the_whole_model(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(X), model(X))


def test_averaged_model_round_trip(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    state = copy.deepcopy(average.state_dict())
    assert list(state) == ["n_averaged", *[f"module.{key}" for key in model.state_dict()]]
    with torch.no_grad():
        average.module.body.weight.zero_()
    average.load_state_dict(state)
    torch.testing.assert_close(average(X), model(X))
    del state["module.head.bias"]
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        average.load_state_dict(state)


def test_functional_call():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))
            self.body = nn.Linear(4, 2)

        def forward(self, x):
            return self.gain * self.body(x)

    model = fabric_on_cpu().setup(Root())
    doubled = {"gain": torch.full((1,), 2.0), **{f"body.{n}": p for n, p in model.body.named_parameters()}}
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (X,)), 2 * model(X))
    grads = torch.func.grad(lambda parameters: torch.func.functional_call(model, parameters, (X,)).sum())(
        dict(model.named_parameters())
    )
    assert set(grads) == {"gain", "body.weight", "body.bias"}


# hooks


def test_hooks_on_the_wrapper_and_inside(model, net):
    order = []
    model.register_forward_pre_hook(lambda *_: order.append("before wrapper"))
    model.register_forward_hook(lambda *_: order.append("after wrapper"))
    net.register_forward_hook(lambda *_: order.append("after net"))
    net.body.register_full_backward_hook(lambda *_: order.append("backward body"))
    model.register_full_backward_hook(lambda *_: order.append("backward wrapper"))
    model(X.clone().requires_grad_()).sum().backward()
    assert order == [
        "before wrapper",
        "after net",
        "after wrapper",
        "backward body",
        "backward wrapper",
    ]


def test_a_forward_hook_may_replace_the_output(model, net):
    handle = net.register_forward_hook(lambda module, args, out: out * 0)
    assert model(X).abs().sum() == 0
    handle.remove()
    assert model(X).abs().sum() > 0


# containers


def test_a_container_is_indexed_as_the_users():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = fabric_on_cpu().setup(net)
    assert (model[0], model[-1], len(model), list(model)) == (net[0], net[2], 3, list(net))
    assert isinstance(model[:2], nn.Sequential)
    model[1] = nn.Tanh()
    assert isinstance(net[1], nn.Tanh)
    model.append(nn.Linear(2, 1))
    del model[1]
    assert len(net) == len(model) == 3
    assert model(X).shape == (2, 1)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert len(copied) == 3
    torch.testing.assert_close(copied(X), net(X))


def test_other_kinds_of_containers():
    by_name = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.ReLU()})
    model = fabric_on_cpu().setup_module(by_name)
    assert ("a" in model, "c" in model, model["a"], list(model)) == (True, False, by_name["a"], ["a", "b"])
    assert dict(model.items()) == dict(by_name.items())
    compiled = torch.compile(nn.Sequential(nn.ReLU()), backend="eager")
    assert len(fabric_on_cpu().setup_module(compiled)) == 1
    assert not fabric_on_cpu().setup_module(nn.ModuleList())


def test_what_is_no_container_is_none(net):
    model = fabric_on_cpu().setup(net)
    assert bool(model)
    assert not hasattr(model, "__len__")
    with pytest.raises(TypeError, match="is not subscriptable"):
        model[0]
    with pytest.raises(TypeError, match="not iterable"):
        iter(model)


# where a model is


def test_device_and_dtype_follow_the_parameters(net):
    model = fabric_on_cpu(precision="64-true").setup(net)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float64)
    model.to(torch.float16)
    assert model.dtype == torch.float16
    model.to("meta")
    assert model.device == torch.device("cpu")  # where inputs belong: no tensor says otherwise
    bare = fabric_on_cpu().setup(nn.ReLU())
    assert (bare.device, bare.dtype) == (torch.device("cpu"), torch.get_default_dtype())


def test_a_device_of_the_users_own_wins(net):
    class Own(Net):
        @property
        def device(self):
            return self.nothing

    net.device = "mine"
    model = fabric_on_cpu().setup(net)
    assert model.device == "mine"
    model.dtype = "too"
    assert (net.dtype, model.dtype) == ("too", "too")
    with pytest.raises(AttributeError, match="'Own' object has no attribute"):
        _ = fabric_on_cpu().setup(Own()).device


# methods other than forward


def test_methods_run_on_the_users_module(model, net):
    torch.testing.assert_close(model.loss(X), net(X).pow(2).mean())
    torch.testing.assert_close(model.two(X), net.two(X))
    assert not model.generate(X, 3).requires_grad
    assert model.extra_repr() == ""


def test_a_marked_method_has_the_precision_of_forward(net):
    class Look(Net):
        def dtype(self, x):
            return self.body(x).dtype, torch.is_autocast_enabled("cpu")

    model = fabric_on_cpu(precision="bf16-mixed").setup(Look())
    assert model.dtype(X) == (torch.float32, False)
    model.mark_forward_method("dtype")
    assert model.dtype(X) == (torch.bfloat16, True)


def test_mark_by_method_and_the_marked_method_recurses_not(net):
    model = fabric_on_cpu(precision="bf16-true").setup(net)
    model.mark_forward_method(model.loss)
    assert model.loss(X).dtype is torch.float32
    assert model.loss(X).requires_grad


def test_mark_errors(model):
    with pytest.raises(ConfigurationError, match="forward needs no mark"):
        model.mark_forward_method("forward")
    with pytest.raises(AttributeError, match="Net has no method 'nothing'"):
        model.mark_forward_method("nothing")
    with pytest.raises(AttributeError, match="Net has no method 'note'"):
        model.mark_forward_method("note")
    with pytest.raises(ArgumentTypeError, match="takes a method or its name, but got int"):
        model.mark_forward_method(3)


# wrapping and unwrapping


def test_is_wrapped_and_unwrap(model, net):
    assert is_wrapped(model)
    assert not is_wrapped(net)
    assert isinstance(model, _FabricModule)
    assert unwrap(model) is net
    assert unwrap(torch.compile(model, backend="eager")) is net
    assert is_wrapped(torch.compile(model, backend="eager"))
    assert unwrap(3) == 3


def test_by_hand(net):
    """The class can be used without Fabric.setup, as a library does."""
    strategy = fabric_on_cpu().strategy
    torch.testing.assert_close(_FabricModule(net, strategy)(X), net(X))
    assert _FabricModule(net, strategy, original_module=net).module is net


@pytest.mark.parametrize("verb", ["setup", "setup_module"])
def test_setup_refuses(model, net, verb):
    fabric = fabric_on_cpu()
    with pytest.raises(ConfigurationError, match=rf"fabric\.{verb}: this Net is set up already"):
        getattr(fabric, verb)(model)
    with pytest.raises(ConfigurationError, match="Net is set up already"):
        getattr(fabric, verb)(torch.compile(model, backend="eager"))
    with pytest.raises(ArgumentTypeError, match=r"needs torch's Module, but got function"):
        getattr(fabric, verb)(lambda x: x)


def test_two_setups_are_independent(net):
    fabric = fabric_on_cpu()
    one, other = fabric.setup(net), fabric.setup_module(Held())
    assert one.note == "hello"
    assert not hasattr(other, "note")
    assert list(other.state_dict()) == ["module.weight", "module.bias"]


# two ranks


def ddp(**kwargs):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", **kwargs)
    fabric.launch()
    return fabric


def two_ranks(build, *args):
    fabric = ddp()
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return build(fabric, model, optimizer, *args)


def average_follows(fabric, model, optimizer):
    """An exponential average by deepcopy, as raw loops do it; evaluated on one rank only."""
    average = copy.deepcopy(model).eval().requires_grad_(False)
    for step in range(3):
        loss = model(X * (fabric.global_rank + step)).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.5)
    with torch.no_grad():
        if fabric.global_rank == 0:
            assert average(X).shape == (2, 2)
    assert list(average.state_dict()) == list(model.state_dict()) == list(unwrap(model).state_dict())
    return [p.clone() for p in average.parameters()], [p.detach().clone() for p in model.parameters()]


def follow():
    return two_ranks(average_follows)


def test_the_average_of_a_replica(ranks):
    (mean_0, now_0), (mean_1, now_1) = ranks.run(follow, world_size=2)
    for left, right in zip([*mean_0, *now_0], [*mean_1, *now_1], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert not torch.equal(mean_0[0], now_0[0])


def steps_by_method(name, plain):
    def run(fabric, model, optimizer):
        loss = getattr(model, name)(X * (fabric.global_rank + 1))
        loss.backward() if plain else fabric.backward(loss)
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    return two_ranks(run)


@pytest.mark.parametrize("name", ["loss", "two", "forward_sum"])
@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "fabric.backward"])
def test_any_method_keeps_the_gradient_sync(ranks, name, plain):
    if name == "forward_sum":
        first, second = ranks.run(steps_by_forward, plain, world_size=2)
    else:
        first, second = ranks.run(steps_by_method, name, plain, world_size=2)
    torch.manual_seed(0)
    net = Net()
    losses = [
        (getattr(net, name) if name != "forward_sum" else lambda x: net(x).sum())(X * k) for k in (1, 2)
    ]
    (sum(losses) / 2).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for left, right, expected in zip(first, second, net.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
        torch.testing.assert_close(left, expected)


def steps_by_forward(plain):
    def run(fabric, model, optimizer):
        loss = model(X * (fabric.global_rank + 1)).sum()
        loss.backward() if plain else fabric.backward(loss)
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    return two_ranks(run)


def evaluates_unevenly():
    def run(fabric, model, optimizer):
        model.eval()
        with torch.no_grad():
            for _ in range(fabric.global_rank * 3):
                model(X)
                model.generate(X, 2)
        fabric.barrier()
        return True

    return two_ranks(run)


def test_methods_under_no_grad_make_no_collective(ranks):
    assert ranks.run(evaluates_unevenly, world_size=2) == [True, True]


def facade():
    def run(fabric, model, optimizer):
        net = model.module
        assert type(model._forward_module).__name__ == "DistributedDataParallel"
        assert type(net) is Net
        for method in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            assert list(dict(getattr(model, method)())) == list(dict(getattr(net, method)())), method
        model.eval()
        assert not model._forward_module.training
        assert not net.body.training
        model.train()
        assert model._forward_module.training
        model.scale = 4.0
        assert net._scale == 4.0
        model.to(torch.float32)
        container = nn.ModuleDict({"m": model})
        state = copy.deepcopy(container.state_dict())
        assert list(state) == [f"m.{key}" for key in net.state_dict()]
        container.load_state_dict(state)
        return True

    return two_ranks(run)


def test_the_facade_under_ddp(ranks):
    assert ranks.run(facade, world_size=2) == [True, True]


def test_a_tree_of_wrappers_is_unwrapped(net):
    fabric = fabric_on_cpu()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, view = fabric.setup(net, optimizer)
    state = _unwrap_objects({"model": model, "rest": [view, 3]})
    assert state["model"] is net
    assert state["rest"] == [optimizer, 3]
