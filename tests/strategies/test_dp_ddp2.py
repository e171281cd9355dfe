"""Training by "dp" and "ddp2" equals plain torch on the joined batch of all devices and machines."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ports import free_port
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.environments.process_group import ProcessGroupEnvironment
from fabric.strategies import DDP2Strategy

STEPS = 3
DEVICES = pytest.mark.parametrize("devices", [1, 2, 3, 4])
ROWS = pytest.mark.parametrize("rows", [12, 7, 2, 1])


class Mlp(nn.Module):
    """Layers of which one is frozen and two share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.frozen(torch.tanh(self.body(x)))
        return self.head(self.second(torch.tanh(self.first(x))))

    def loss(self, x):
        x = self.frozen(torch.sin(self.body(x)))
        return self.head(self.second(torch.sin(self.first(x)))).pow(2).mean()


class Conv(nn.Module):
    """Images as rows of 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        )

    def forward(self, x):
        return self.layers(x.repeat(1, 4)[:, :16].reshape(-1, 1, 4, 4))


class Attention(nn.Module):
    """A transformer's layer and a recurrent one, on rows as sequences of length 5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.rnn = nn.GRU(8, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.layer(self.embed(x.unsqueeze(-1)), src_key_padding_mask=x < -2)
        return self.head(self.rnn(hidden)[0][:, -1])


MODELS = {"mlp": Mlp, "conv": Conv, "attention": Attention}


def contrastive(z: torch.Tensor) -> torch.Tensor:
    """Every row against all others."""
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)).flip(0)) + z.mean()


def squares(z: torch.Tensor) -> torch.Tensor:
    return z.pow(2).mean()


LOSSES = {"contrastive": contrastive, "squares": squares}


def data(count: int, *shape: int) -> torch.Tensor:
    return torch.randn(count, *shape, 5, generator=torch.Generator().manual_seed(11))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(fabric: Fabric, model, batches, loss=squares, accumulate: int = 1, clip: dict | None = None):
    """The weights after STEPS steps; `batches` holds STEPS * accumulate of them."""
    optimizer = optimizer_of(model)
    model, optimizer = fabric.setup(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                fabric.backward(loss(model(batches[step * accumulate + micro])) / accumulate)
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def train_plain(model, batches, loss=squares, accumulate: int = 1, clip: dict | None = None):
    """The oracle. A batch is (rows, 5), or (machines, rows, 5): then the mean of the machines' losses."""
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            batch = batches[step * accumulate + micro]
            parts = [batch] if batch.dim() == 2 else list(batch)
            (torch.stack([loss(model(part)) for part in parts]).mean() / accumulate).backward()
        if clip and "max_norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), **clip)
        elif clip:
            nn.utils.clip_grad_value_(model.parameters(), **clip)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(got, expected, atol: float = 2e-6, rtol: float = 1e-5) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol, msg=lambda text, i=index: f"{i}: {text}")


def start(devices: int = 2, **kwargs) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="dp", **kwargs)
    fabric.launch()
    return fabric


# dp


@DEVICES
@ROWS
@pytest.mark.parametrize("loss", LOSSES)
def test_dp_equals_plain_torch(devices, rows, loss):
    batches = data(STEPS, rows)
    expected = train_plain(Mlp(), batches, LOSSES[loss])
    assert_same(train(start(devices), Mlp(), batches, LOSSES[loss]), expected)
    assert (expected[0] - Mlp().body.weight).abs().max() > 1e-4, "training must change something"


@DEVICES
@pytest.mark.parametrize("model", ["conv", "attention"])
def test_dp_equals_plain_torch_for_other_models(devices, model):
    batches = data(STEPS, 7)
    assert_same(
        train(start(devices), MODELS[model](), batches), train_plain(MODELS[model](), batches), atol=1e-5
    )


CLIPS = {"none": None, "norm": {"max_norm": 0.01}, "value": {"clip_val": 0.002}}
PLAIN_CLIPS = {"none": None, "norm": {"max_norm": 0.01}, "value": {"clip_value": 0.002}}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("precision", "atol"),
    [("32-true", 2e-6), ("64-true", 1e-13), ("bf16-mixed", 5e-3), ("16-mixed", 1e-3), ("bf16-true", 2e-2)],
)
def test_dp_under_precision_accumulation_and_clipping(accumulate, clip, precision, atol):
    batches = data(STEPS * accumulate, 7)
    got = train(start(3, precision=precision), Mlp(), batches, squares, accumulate, CLIPS[clip])
    one = Fabric(accelerator="cpu", devices=1, precision=precision)
    expected = train(one, Mlp(), batches, squares, accumulate, CLIPS[clip])
    assert [p.dtype for p in got] == [p.dtype for p in expected]
    assert_same(got, expected, atol=atol, rtol=0)
    if precision == "32-true":
        assert_same(got, train_plain(Mlp(), batches, squares, accumulate, PLAIN_CLIPS[clip]))
    moved = max(
        float((p - q.detach().to(p.dtype)).abs().max()) for p, q in zip(got, Mlp().parameters(), strict=True)
    )
    assert moved > 4 * atol or clip != "none", "the tolerance must be far below what training changes"


def scaled_steps(fabric: Fabric, batches) -> tuple[list[torch.Tensor], list[float]]:
    model = Mlp()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    scales = []
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(squares(model(batch)))
        optimizer.step()
        scales.append(fabric.strategy.precision.state_dict()["scale"])
    return [p.detach().clone() for p in model.parameters()], scales


def test_dp_skips_a_step_whose_gradients_are_infinite():
    batches = data(4, 7)
    batches[2, 5] = torch.inf  # one row of the second replica
    model = Mlp()
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu")
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(batch)
        scaler.scale(squares(out.float())).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    got, scales = scaled_steps(start(2, precision="16-mixed"), batches)
    assert scales == expected
    assert scales[2] == scales[1] / 2
    assert_same(got, model.parameters(), atol=1e-3)


def test_dp_with_trees_in_and_out():
    class Trees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = Mlp()

        def forward(self, batch, *, scale):
            return {"out": [self.net(batch["x"]) * scale, batch["y"]], "name": batch["name"]}

    def run(model, x):
        out = model({"x": x, "y": x.sum(1), "name": "b"}, scale=torch.tensor(0.5))
        assert out["name"] == "b"
        (out["out"][0].sum(1) - out["out"][1]).pow(2).mean().backward()

    x = data(1, 7)[0]
    net, plain = Trees(), Trees()
    run(start(3).setup(net), x)
    run(plain, x)
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    assert all(q.grad is None if p.grad is None else torch.allclose(p.grad, q.grad) for p, q in pairs)
    assert net.net.body.weight.grad.abs().max() > 1e-3


def test_dp_gives_gradients_to_its_inputs():
    x = data(1, 7)[0]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    contrastive(start(3).setup(Mlp())(a)).backward()
    contrastive(Mlp()(b)).backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_dp_in_second_order():
    x = data(1, 6)[0].requires_grad_()
    grads = []
    for model in (start(3).setup(Mlp()), Mlp()):
        (grad,) = torch.autograd.grad(squares(model(x)), x, create_graph=True)
        grad.pow(2).sum().backward()
        grads.append(next(model.parameters()).grad)
    torch.testing.assert_close(*grads)
    assert grads[0].abs().max() > 1e-6


def test_dp_evaluates_as_plain_torch():
    net = nn.Sequential(Mlp(), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model = start(3).setup(net)
    model.train()(data(1, 9)[0])
    x = data(1, 7)[0]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), copy.deepcopy(net)(x))


# ddp2


class MachineEach(ProcessGroupEnvironment):
    """Every rank of the pool as a machine of its own."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()

    def local_world_size(self) -> int:
        return 1


def machines(devices: int = 2, precision=None, **settings) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=devices,
        num_nodes=dist.get_world_size(),
        strategy=DDP2Strategy(**settings) if settings else "ddp2",
        plugins=MachineEach(),
        precision=precision,
    )
    fabric.launch()
    return fabric


def train_machine(devices, rows, loss, accumulate=1, clip=None, compiled=False, model="mlp", **settings):
    fabric = machines(devices, **settings)
    batches = data(STEPS * accumulate, fabric.world_size, rows)[:, fabric.global_rank]
    net = MODELS[model]()
    net = torch.compile(net, backend="eager") if compiled else net
    weights = train(fabric, net, batches, LOSSES[loss], accumulate, CLIPS[clip or "none"])
    fabric.strategy.teardown()
    return weights


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rows", [6, 5, 2])
def test_ddp2_equals_plain_torch(ranks, world_size, devices, loss, rows):
    results = ranks.run(train_machine, devices, rows, loss, world_size=world_size)
    expected = train_plain(Mlp(), data(STEPS, world_size, rows), LOSSES[loss])
    for weights in results:
        assert_same(weights, expected)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_ddp2_with_accumulation_and_clipping(ranks, accumulate, clip):
    results = ranks.run(train_machine, 2, 5, "contrastive", accumulate, clip, world_size=2)
    batches = data(STEPS * accumulate, 2, 5)
    expected = train_plain(Mlp(), batches, contrastive, accumulate, PLAIN_CLIPS[clip])
    for weights in results:
        assert_same(weights, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"compiled": True},
        {"model": "conv"},
        {"model": "attention"},
    ],
    ids=str,
)
def test_ddp2_in_other_settings(ranks, settings):
    expected = train_plain(MODELS[settings.get("model", "mlp")](), data(STEPS, 2, 5), contrastive)
    for weights in ranks.run(train_machine, 2, 5, "contrastive", world_size=2, **settings):
        assert_same(weights, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "atol"), [("64-true", 1e-13), ("bf16-mixed", 5e-3), ("16-mixed", 1e-3)]
)
def test_ddp2_under_precision(ranks, precision, atol):
    batches = data(STEPS, 2, 5)
    got = ranks.run(train_machine, 2, 5, "squares", world_size=2, precision=precision)
    net = Mlp().double() if precision == "64-true" else Mlp()
    batches = batches.double() if precision == "64-true" else batches
    expected = train_plain(net, batches, lambda out: squares(out.float()))  # what a forward gives back
    for weights in got:
        assert_same(weights, expected, atol=atol, rtol=0)


def facts() -> dict:
    fabric = machines(3)
    world, rank = fabric.world_size, fabric.global_rank
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(12)), batch_size=3))
    fabric.print(f"machine {rank}")
    return {
        "place": (world, rank, fabric.local_rank, fabric.node_rank, fabric.strategy.num_processes),
        "local": (fabric.strategy.topology.local_world_size, fabric.strategy.num_nodes),
        "sampler": fabric.strategy.distributed_sampler_kwargs,
        "devices": len(fabric.strategy.parallel_devices),
        "rows": [len(batch) for (batch,) in loader],
        "seen": torch.cat([batch for (batch,) in loader]).tolist(),
        "reduced": fabric.all_reduce(float(rank), reduce_op="sum").item(),
    }


def test_a_rank_is_a_machine(ranks):
    first, second = ranks.run(facts, world_size=2)
    assert first["place"] == (2, 0, 0, 0, 1)
    assert second["place"] == (2, 1, 0, 1, 1)
    for rank, got in enumerate((first, second)):
        assert got["local"] == (1, 2)
        assert got["devices"] == 3
        assert got["sampler"] == {"num_replicas": 2, "rank": rank}
        assert got["rows"] == [3, 3]
        assert got["reduced"] == 1
    assert sorted(first["seen"] + second["seen"]) == list(range(12))


def ways_to_a_gradient() -> None:
    fabric = machines(2)
    share = data(1, fabric.world_size, 5)[0]
    for way in ("forward", "plain", "method", "two forwards", "after no_sync"):
        net, plain = Mlp(), Mlp()
        model = fabric.setup(net)
        mine = share[fabric.global_rank]
        losses = {
            "method": lambda m, x: m.loss(x),
            "two forwards": lambda m, x: squares(m(x)) + m(2 * x).mean(),
        }
        loss = losses.get(way, lambda m, x: squares(m(x)))
        repeats = 1
        if way == "plain":
            loss(model, mine).backward()
        else:
            if way == "after no_sync":
                repeats = 2
                with fabric.no_backward_sync(model):
                    fabric.backward(loss(model, mine))
            fabric.backward(loss(model, mine))
        (repeats * torch.stack([loss(plain, part) for part in share]).mean()).backward()
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None or not p.grad.any(), (way, name)
            else:
                torch.testing.assert_close(p.grad, q.grad, msg=f"{way}: {name}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_ddp2_gradients_by_every_way(ranks, world_size):
    ranks.run(ways_to_a_gradient, world_size=world_size)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.norm(x))


def buffers_and_states(path: str) -> dict:
    fabric = machines(2)
    share = data(2, fabric.world_size, 6)
    net = Normed()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    for batch in share:
        fabric.backward(squares(model(batch[fabric.global_rank])))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.barrier()
    fresh = Normed()
    nn.init.zeros_(fresh.head.weight)
    other, other_optimizer = fabric.setup(fresh, optimizer_of(fresh))
    fabric.load(path, {"model": other, "optimizer": other_optimizer})
    states = zip(net.state_dict().values(), fresh.state_dict().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in states)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    x = share[0, 0]
    return {
        "buffers": [b.clone() for b in net.buffers()],
        "keys": (list(model.state_dict()), [name for name, _ in model.named_parameters()]),
        "own": model.module is net and fabric.strategy.layout.unwrap(model._forward_module) is net,
        "loaded": same,
        "copies": [torch.equal(c.eval()(x), model.eval()(x)) for c in copies],
    }


def test_ddp2_buffers_states_and_copies(ranks, tmp_path):
    results = ranks.run(buffers_and_states, str(tmp_path / "x.pt"), world_size=2)
    alone = Normed()
    for batch in data(2, 2, 6):
        alone(batch[0])  # machine 0's
    for got in results:
        for one, other in zip(got["buffers"], alone.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        keys = list(alone.state_dict())
        assert got["keys"] == (keys, [name for name, _ in alone.named_parameters()])
        assert got["own"]
        assert got["loaded"]
        assert got["copies"] == [True, True]


def infinite_on_one_machine() -> tuple[list[torch.Tensor], list[float]]:
    fabric = machines(2, precision="16-mixed")
    batches = data(4, fabric.world_size, 5)
    batches[2, 1, 4] = torch.inf
    return scaled_steps(fabric, batches[:, fabric.global_rank])


def test_ddp2_skips_a_step_on_all_machines(ranks):
    (first, scales), (second, others) = ranks.run(infinite_on_one_machine, world_size=2)
    assert scales == others == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


class Unused(Mlp):
    def forward(self, x):
        return self.head(self.body(x))


def refusals() -> list[str]:
    fabric = machines(2)
    texts = []
    model = fabric.setup(Unused())
    with pytest.raises(UsageError) as caught:
        fabric.backward(squares(model(data(1, 4)[0])))
    texts.append(str(caught.value))
    model = fabric.setup(Mlp())
    model.module.frozen.requires_grad_(True)
    with pytest.raises(UsageError) as caught:
        fabric.backward(squares(model(data(1, 4)[0])))
    texts.append(str(caught.value))
    return texts


def test_ddp2_names_parameters_as_the_user_does(ranks):
    for unused, thawed in ranks.run(refusals, world_size=2):
        assert "got no gradient" in unused
        assert " first.weight, first.bias, second.bias" in unused
        assert "Parameter frozen.weight was frozen" in thawed


def ignored() -> list[bool]:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.bias"])
    fabric = machines(2)
    model = fabric.setup(net)
    fabric.backward((model(data(1, 4)[0]) * (fabric.global_rank + 1)).sum())
    return [torch.equal(*fabric.all_gather(p.grad)) for p in net.parameters()]


def test_parameters_that_the_user_keeps_out_of_ddp(ranks):
    for alike in ranks.run(ignored, world_size=2):
        assert alike == [True, True, True, False]


def two_on_one_machine() -> str:
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy="ddp2")
    return str(caught.value)


def test_two_processes_on_one_machine_are_refused(ranks):
    for text in ranks.run(two_on_one_machine, world_size=2):
        assert "DDP2Strategy runs one process per machine, which uses all of its devices, but 2 were" in text
        assert "torchrun --nnodes N --nproc-per-node 1" in text
        assert 'strategy="ddp"' in text


class Second(MachineEach):
    """The second process of its machine, in an environment that does not count them."""

    def local_rank(self) -> int:
        return 1

    def local_world_size(self) -> None:
        return None

    def num_nodes(self) -> None:
        return None


def second_of_its_machine() -> str:
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy="ddp2", plugins=Second())
    return str(caught.value)


def test_a_second_process_on_a_machine_is_refused(ranks):
    (text,) = ranks.run(second_of_its_machine, world_size=1)
    assert "local rank 1, but DDP2Strategy with devices=2 runs 1 per machine (one for all devices)" in text


def test_there_is_nothing_to_start():
    with pytest.raises(ConfigurationError, match=r"start_method='spawn'.*Leave start_method out"):
        DDP2Strategy(start_method="spawn")


SCRIPT = """
import json, sys
import torch
from fabric import Fabric

torch.manual_seed(0)
net = torch.nn.Linear(5, 2)
fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp2")
fabric.launch()
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
x = torch.randn(3, 2, 6, 5, generator=torch.Generator().manual_seed(1))
for batch in x:
    optimizer.zero_grad()
    fabric.backward(model(batch[fabric.global_rank]).pow(2).mean())
    optimizer.step()
place = [fabric.global_rank, fabric.world_size, fabric.local_rank, fabric.node_rank]
sys.stdout.write(json.dumps({"place": place, "weights": net.weight.flatten().tolist()}) + "\\n")
"""


def finish(processes: list[subprocess.Popen]) -> list[dict]:
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


def begin(command: list[str], **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


@pytest.fixture
def script(tmp_path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def check_lines(lines: list[dict]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        squares(net(batch)).backward()
        optimizer.step()
    assert sorted(line["place"] for line in lines) == [[0, 2, 0, 0], [1, 2, 0, 1]]
    for line in lines:
        torch.testing.assert_close(torch.tensor(line["weights"]), net.weight.detach().flatten())


@pytest.mark.slow
def test_the_script_started_on_two_machines(script):
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    lines = finish([begin([sys.executable, script], NODE_RANK=str(rank), **place) for rank in range(2)])
    check_lines(lines)


def torchrun(script: str, rank: int, port: int, processes: int = 1) -> list[str]:
    options = ["--nnodes=2", f"--nproc-per-node={processes}", f"--node-rank={rank}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *address, script]


@pytest.mark.slow
def test_torchrun_on_two_machines(script):
    port = free_port()
    check_lines(finish([begin(torchrun(script, rank, port)) for rank in range(2)]))


@pytest.mark.slow
def test_torchrun_with_two_processes_on_each_machine(script):
    port = free_port()
    processes = [begin(torchrun(script, rank, port, processes=2)) for rank in range(2)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode != 0
        assert "DDP2Strategy runs one process per machine" in error
        assert "but 2 were started on this machine" in error
