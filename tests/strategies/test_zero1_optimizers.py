"""strategy="zero1" with optimizers of the user's: methods beside `step`, and steps that join parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.strategies.zero1.joint import couples_parameters


class ScheduleFree(Optimizer):
    """In the manner of schedule-free SGD: `eval()` and `train()` move the parameters by their states."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, training, weight):
        for group in self.param_groups:
            if group["training"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["training"] = training

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    @property
    def rate(self):
        return self.param_groups[0]["lr"]

    def steps(self, plus=0):
        return self.param_groups[0]["k"] + plus

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=group["lr"] * (group["beta"] * 0.5 - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Lookahead(SGD):
    """Slow weights are made by the method itself."""

    @torch.no_grad()
    def average(self):
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.lerp_(self.state[p].setdefault("slow", p.clone()), 0.5)
            self.state[p]["slow"] = p.clone()


class Perturbed(SGD):
    """Its method needs no state, and all gradients: every rank does the same."""

    @torch.no_grad()
    def ascend(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.data = p + 0.05 * p.grad / norm


class SAM(SGD):
    """In the manner of sharpness-aware minimisation: one method reads states that another wrote."""

    @torch.no_grad()
    def first_step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))

    @torch.no_grad()
    def second_step(self):
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.copy_(self.state[p]["old"]).add_(p.grad, alpha=-0.1)


METHODS = {ScheduleFree: ("eval", "train"), Lookahead: ("average",), Perturbed: ("ascend",)}
METHODS[SAM] = ("first_step", "second_step")


def steps(optimizer, methods, model, backward, x, y):
    """The loss, and the parameters after each step and each method."""
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        backward((model(x) - y).pow(2).mean())
        optimizer.step()
        for name in methods:
            getattr(optimizer, name)()
            seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


X = torch.arange(48.0, dtype=torch.float64).view(12, 4).sin()


def on_ranks(kind, methods):
    rank, size = dist.get_rank(), dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=size, strategy="zero1")
    fabric.launch()
    model = made()
    model, optimizer = fabric.setup(model, kind(model.parameters(), lr=0.1))
    found = steps(
        optimizer, methods, model, fabric.backward, X[rank::size], X[rank::size].sum(1, keepdim=True)
    )
    own = (optimizer.rate, optimizer.steps(plus=1)) if kind is ScheduleFree and rank == 0 else None
    return found, own


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", METHODS)
def test_methods_beside_step_are_those_of_one_process(ranks, kind, world_size):
    model = made()
    optimizer = kind(model.parameters(), lr=0.1)
    want = steps(optimizer, METHODS[kind], model, torch.Tensor.backward, X, X.sum(1, keepdim=True))
    results = ranks.run(on_ranks, kind, METHODS[kind], world_size=world_size)
    for found, _ in results:
        torch.testing.assert_close(found, want)
    if kind is ScheduleFree:  # a method that changes nothing is no call of all ranks
        assert results[0][1] == (0.1, 5)


class ClippedInside(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.add_(p.grad / norm.clamp(min=1.0), alpha=-0.1)


class LambTogether(Optimizer):
    """A trust ratio of each tensor, but after a clip of all gradients."""

    together = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [
            (p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p, _ in held]).norm().clamp(min=1.0) if self.together else 1.0
        for p, lr in held:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad / norm, 0.1)
            square = self.state[p].setdefault("square", torch.zeros_like(p))
            square.mul_(0.9).addcmul_(p.grad, p.grad)
            update = mean / (square.sqrt() + 1e-6)
            p.sub_(update * (lr * p.norm() / update.norm().clamp(min=1e-6)))


class Lamb(LambTogether):
    together = False


class DAdaptation(Optimizer):
    """One estimate of the learning rate, from products over all parameters, that starts tiny (Prodigy)."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        d, numerator, denominator = *[self.param_groups[0][name] for name in ("d", "numerator")], 0.0
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            first = self.state[p].setdefault("first", p.clone())
            total = self.state[p].setdefault("total", torch.zeros_like(p))
            numerator += d * float((p.grad * (first - p)).sum())
            denominator += float(total.add_(p.grad, alpha=d).abs().sum())
        d = max(d, numerator / denominator) if denominator else d
        for group in self.param_groups:
            group.update(d=d, numerator=numerator)
        for p in held:
            p.sub_(p.grad.sign(), alpha=d)


class Inner(Optimizer):
    """Around another optimizer, whose groups it shares."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.base = Adam(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        return self.base.step()


class Noisy(Lamb):
    def step(self, closure=None):
        super().step()
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.data.add_(torch.randn_like(p), alpha=0.01)


class OnDevices(SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].numel() < 100:
            raise RuntimeError("this kernel takes blocks of 100")
        return super().step(closure)


class OfAClosure(SGD):
    def step(self, closure):
        return super().step(closure)


class OwnList(SGD):
    """Decays towards the initial weights, which it has in a list in the order of the parameters."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def own(self, number, p):
        return self.first[number]

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in enumerate(params):
            p.lerp_(self.own(number, p), 1e-4)
        return super().step(closure)


class OwnDictionary(OwnList):
    """As above, found by the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        params = [p for group in self.param_groups for p in group["params"]]
        self.first = dict(zip(params, self.first, strict=True))

    def own(self, number, p):
        return self.first[p]


class OwnMomentum(OwnList):
    """A list of zeros is right on each rank: its entries are those of the parameters that the rank steps."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.first = [torch.zeros_like(p) for p in self.first]


class Slow(Optimizer):
    """Lookahead, as many write it."""

    def __init__(self, params, lr):
        self.inner = SGD(params, lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, average in zip(group["params"], slow, strict=False):
                if self.count % 3 == 0:
                    p.copy_(average.lerp_(p, 0.5))


def square(kind):
    """An optimizer of parameters of one shape, of which a wrong entry raises no error."""
    layers = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])
    return kind(layers.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [OwnList, Slow])
def test_a_list_of_the_optimizers_own_is_found(kind):
    assert couples_parameters(square(kind))


@pytest.mark.parametrize("kind", [OwnDictionary, OwnMomentum])
def test_own_tensors_that_each_rank_finds_are_allowed(kind):
    assert not couples_parameters(square(kind))


JOINT = [OwnList, ClippedInside, LambTogether, DAdaptation]
APART = [OwnDictionary, Lamb, Inner, Noisy, OnDevices, OfAClosure, ScheduleFree, Lookahead, Perturbed]


@pytest.mark.parametrize("kind", [*JOINT, *APART])
def test_a_step_that_joins_parameters_is_told_by_a_trial_that_changes_nothing(kind):
    net = nn.Sequential(nn.Linear(40, 80), nn.Conv2d(3, 4, 3), nn.Embedding(1000, 16))
    optimizer = kind([{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 0.01}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the trial is no step of the user's"))
    before = [p.clone() for p in net.parameters()]
    drawn = torch.get_rng_state()
    assert couples_parameters(optimizer) is (kind in JOINT)
    assert all(map(torch.equal, before, net.parameters()))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state


TORCHS = [
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta"),
    *("Adafactor", "Muon"),
]


@pytest.mark.parametrize("name", TORCHS)
def test_classes_around_those_of_torch_are_not_refused(name):
    base = getattr(torch.optim, name)

    class Around(base):
        def step(self, closure=None):
            return super().step(closure)

    weights = [nn.Parameter(torch.randn(3 + i, 4)) for i in range(5)]
    for kind in (base, Around):
        assert not couples_parameters(kind(weights, lr=0.1))


def set_up(kind):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zero1")
    fabric.launch()
    model = made()
    fabric.setup(model, kind(model.parameters(), lr=0.1))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [*JOINT, Slow])
def test_it_is_refused_at_setup_on_all_ranks(ranks, kind, world_size):
    for error in ranks.run_expecting_errors(set_up, kind, world_size=world_size):
        assert isinstance(error, ConfigurationError)
        assert f"{kind.__name__}.step() updates a parameter by values of other parameters" in str(error)
        assert 'Write Fabric(strategy="ddp")' in str(error)


class Around(Optimizer):
    """It holds another optimizer, whose `load_state_dict` it calls."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, {}

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


def step_around(strategy, folder, load):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model, x = made(), X[fabric.global_rank :: fabric.world_size]
    model, optimizer = fabric.setup(model, Around(Adam(model.parameters(), lr=0.1)))
    if load:
        fabric.load(folder / "around", {"model": model, "optimizer": optimizer})
    for step in range(2):
        optimizer.zero_grad()
        fabric.backward(model(x).sub(1).square().mean())
        optimizer.step()
        if not load and step == 0:
            fabric.save(folder / "around", {"model": model, "optimizer": optimizer}, format="sharded")
        if load:
            break
    return [value.tolist() for value in model.state_dict().values()]


def test_an_optimizer_around_another_loads_all_states_of_a_sharded_checkpoint(ranks, tmp_path):
    expected = ranks.run(step_around, "fsdp", tmp_path, False, world_size=2)
    found = ranks.run(step_around, "zero1", tmp_path, True, world_size=2)
    torch.testing.assert_close(found, expected)
