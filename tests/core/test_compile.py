"""torch.compile before and after setup: one graph, the user's own keys, and loading across every wrapping."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn

from fabric import Fabric
from fabric.core.compile import is_compiled
from fabric.wrappers import unwrap

X = torch.ones(2, 4)
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "64-true", "16-mixed"]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(torch.relu(self.body(x)))

    def loss(self, x):
        return self(x).sum()


class Nested(Block):
    def forward(self, batch, *, scale):
        return {"out": super().forward(batch["x"] * scale), "index": batch["index"]}


def compiled(module, **kwargs):
    return torch.compile(module, backend="eager", **kwargs)


def on_cpu(**kwargs):
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **kwargs})
    fabric.launch()
    return fabric


def made(kind=Block):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_graph_with_the_same_numbers(precision, when):
    fabric = on_cpu(precision=precision)
    expected = fabric.setup(made())(X)
    if when == "before":
        model = fabric.setup(compiled(made(), fullgraph=True))
    else:
        model = compiled(fabric.setup(made()), fullgraph=True)
    out = model(X)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    fabric.backward(out.sum())
    assert unwrap(model).body.weight.grad is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_graph_break_and_no_recompilation(precision):
    fabric = on_cpu(precision=precision)
    model = fabric.setup(made())
    report = torch._dynamo.explain(model)(X)
    assert (report.graph_count, report.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model = compiled(fabric.setup(made()), fullgraph=True)
        for _ in range(3):
            model(X)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_one_graph_over_nested_inputs_and_outputs(precision):
    fabric = on_cpu(precision=precision)
    batch = {"x": X.double(), "index": torch.tensor([0, 1])}
    expected = fabric.setup(made(Nested))(batch, scale=torch.tensor(2.0))
    model = compiled(fabric.setup(made(Nested)), fullgraph=True)
    found = model(batch, scale=torch.tensor(2.0))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found["out"].dtype is torch.float32
    assert found["index"].dtype is torch.int64


def test_training_compiled_equals_training():
    def losses(wrap):
        fabric = on_cpu(precision="bf16-mixed")
        net = made()
        model, optimizer = fabric.setup(wrap(net), torch.optim.SGD(net.parameters(), lr=0.1))
        curve = []
        for step in range(4):
            loss = model(X * step).pow(2).sum()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    assert losses(compiled) == losses(lambda net: net)


def test_the_wrapper_keeps_the_settings_of_the_compilation():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = on_cpu().setup(torch.compile(made(), backend=backend, fullgraph=True))
    model(X)
    assert len(graphs) == 1
    assert is_compiled(model._forward_module)
    assert type(model.module) is Block


def test_compilation_may_be_left_out():
    model = on_cpu().setup(compiled(made()), _reapply_compile=False)
    assert not is_compiled(model._forward_module)
    assert type(model.module) is Block


def test_compiled_in_place():
    net = made()
    net.compile(backend="eager", fullgraph=True)
    model = on_cpu().setup(net)
    torch.testing.assert_close(model(X), made()(X))
    assert list(model.state_dict()) == list(made().state_dict())
    wrapper = on_cpu().setup(made())
    wrapper.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(wrapper(X), made()(X))


# names and files


def inner_compiled():
    net = made()
    net.body = compiled(net.body)
    net.norm = compiled(net.norm)
    return net


WRAPPINGS = {
    "plain": lambda fabric: fabric.setup(made()),
    "compiled": lambda fabric: fabric.setup(compiled(made())),
    "inner compiled": lambda fabric: fabric.setup(inner_compiled()),
    "both compiled": lambda fabric: fabric.setup(compiled(inner_compiled())),
    "compiled after": lambda fabric: compiled(fabric.setup(made())),
    "not set up": lambda fabric: made(),
    "compiled, not set up": lambda fabric: compiled(made()),
}


def different(model):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1)
    return model


@pytest.mark.parametrize(
    "kind", [kind for kind in WRAPPINGS if "not set up" not in kind and "after" not in kind]
)
def test_names_are_the_users_own(kind):
    plain, model = made(), WRAPPINGS[kind](on_cpu())
    for method in ("named_parameters", "named_buffers", "named_modules"):
        assert list(dict(getattr(model, method)())) == list(dict(getattr(plain, method)())), method
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    container = nn.ModuleDict({"m": model})
    container.load_state_dict(copy.deepcopy(container.state_dict()))
    model.load_state_dict(different(plain).state_dict())
    assert (model.body.weight == 1).all()


def round_trip(fabric, folder, kinds=WRAPPINGS):
    """Saves every wrapping, loads each file into every wrapping, strictly, by load and by load_raw."""
    keys = list(made().state_dict())
    for saved in kinds:
        model = different(WRAPPINGS[saved](fabric))
        path = folder / f"{saved}.pt"
        fabric.save(path, {"model": model})
        raw = torch.load(path, weights_only=True)
        assert list(raw["model"]) == keys, saved
        if fabric.is_global_zero:
            torch.save(raw["model"], folder / "raw.pt")
        fabric.barrier()
        for loaded in kinds:
            for way in ("load", "load_raw"):
                target = WRAPPINGS[loaded](fabric)
                if way == "load":
                    rest = fabric.load(path, {"model": target}, strict=True)
                    assert rest == {}
                else:
                    fabric.load_raw(folder / "raw.pt", target, strict=True)
                weights = list(target.parameters())
                assert all((w == n + 1).all() for n, w in enumerate(weights)), (saved, loaded, way)
        fabric.barrier()
    return True


def test_files_load_across_all_wrappings(tmp_path):
    assert round_trip(on_cpu(), tmp_path)


def test_state_dicts_load_across_all_wrappings():
    fabric = on_cpu()
    kinds = [kind for kind in WRAPPINGS if "not set up" not in kind and "after" not in kind]
    for saved, loaded in itertools.product(kinds, kinds):
        target = WRAPPINGS[loaded](fabric)
        target.load_state_dict(different(WRAPPINGS[saved](fabric)).state_dict(), strict=True)
        assert (target.body.weight == 1).all(), (saved, loaded)


DDP_KINDS = ["plain", "compiled", "inner compiled", "compiled after", "not set up"]


def ddp_round_trip(folder):
    return round_trip(on_cpu(devices=2, strategy="ddp"), folder, DDP_KINDS)


def test_files_load_across_all_wrappings_under_ddp(ranks, tmp_path):
    assert all(ranks.run(ddp_round_trip, tmp_path, world_size=2))


def ddp_steps(kind, method):
    """Batch norm's buffers and the gradients agree, whatever compiled the module, and by whatever method."""
    warnings.simplefilter("ignore")  # dynamo's own, about gradients of tensors that are no leaves
    fabric = on_cpu(devices=2, strategy="ddp")
    model = WRAPPINGS[kind](fabric)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(fabric.global_rank)
    for _ in range(2):
        x = torch.randn(4, 4)
        loss = model.loss(x) if method == "loss" else model(x).pow(2).sum()
        loss.backward() if method == "loss" else fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in unwrap(model).state_dict().items()}


AGREE = list(
    itertools.product(["plain", "compiled", "inner compiled", "compiled after"], ["forward", "loss"])
)


@pytest.mark.parametrize(("kind", "method"), AGREE)
def test_ddp_agrees_on_gradients_and_buffers(ranks, kind, method):
    first, second = ranks.run(ddp_steps, kind, method, world_size=2)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=0, atol=0, msg=key)
