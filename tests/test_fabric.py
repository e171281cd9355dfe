"""The verbs of `Fabric` on one process and, where ranks matter, on two of the pool."""

from __future__ import annotations

import csv
import pickle
import random

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric, seed_everything
from fabric.fabric import Fabric as TheSame
from fabric.loggers import CSVLogger
from fabric.strategies import DDPStrategy, SingleDeviceStrategy, exchange


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu")


@pytest.fixture(autouse=True)
def _seed_variables(monkeypatch):
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def of_two() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric


# what it is


def test_nothing_given_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fabric = Fabric()
    assert TheSame is Fabric
    assert fabric.device == torch.device("cpu")
    assert (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size) == (0, 0, 0, 1)
    assert fabric.is_global_zero
    assert isinstance(fabric.strategy, SingleDeviceStrategy)
    assert fabric.accelerator.name() == "cpu"
    assert fabric.loggers == []


def facts():
    fabric = Fabric(accelerator="cpu", devices="auto")
    assert isinstance(fabric.strategy, DDPStrategy), "the group that stands says how many there are"
    fabric.launch()
    place = fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size
    return place, fabric.is_global_zero


def test_facts_of_two_ranks(ranks):
    assert ranks.run(facts, world_size=2) == [((0, 0, 0, 2), True), ((1, 1, 0, 2), False)]


def test_it_reads_what_fabric_run_was_given(monkeypatch):
    monkeypatch.setenv("FABRIC_PRECISION", "bf16-true")
    monkeypatch.setenv("FABRIC_ACCELERATOR", "cpu")
    assert Fabric().strategy.precision.precision == "bf16-true"


# launching


def add(fabric, a, b=0):
    return fabric.world_size, a + b


def test_launch_calls_the_function_and_gives_its_result(fabric):
    assert fabric.launch(add, 1, b=2) == (1, 3)
    assert fabric.launch() is None
    assert fabric.launch(lambda fabric, *args: args, 1, 2) == (1, 2)


class Callable_:
    def __call__(self, fabric):
        return "called"

    def method(self, fabric):
        return "method"


def test_launch_takes_anything_callable(fabric):
    assert fabric.launch(Callable_()) == "called"
    assert fabric.launch(Callable_().method) == "method"
    assert fabric.launch(isinstance, Fabric) is True, "builtins too"


def launch_many_times():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    assert fabric.launch() is None
    group = dist.group.WORLD
    assert fabric.launch() is None
    results = [fabric.launch(add, 1), fabric.launch(add, 2, b=2)]
    assert dist.group.WORLD is group
    return results


def test_launch_is_idempotent(ranks):
    assert ranks.run(launch_many_times, world_size=2) == [[(2, 1), (2, 4)]] * 2


class Trainer(Fabric):
    def run(self, a, b=0):
        """Trains."""
        return type(self).__name__, self.world_size, a + b, self._launched


class Better(Trainer):
    def run(self, a, b=0):
        return ["better", super().run(a, b)]


class Inherited(Trainer):
    pass


@pytest.mark.parametrize(("kind", "inner"), [(Trainer, "Trainer"), (Inherited, "Inherited")])
def test_a_subclass_with_run(kind, inner):
    assert kind(accelerator="cpu").run(1, b=2) == (inner, 1, 3, True)
    assert kind.run.__doc__ == "Trains."


def run_of_a_subclass(launch_first):
    made = Better(accelerator="cpu", devices=2, strategy="ddp")
    if launch_first:
        made.launch()
    contexts = []

    def context():
        contexts.append(1)
        return torch.no_grad()

    made.strategy.module_sharded_context = context
    return made.run(1, b=1), len(contexts)


@pytest.mark.parametrize("launch_first", [False, True])
def test_run_launches_once_and_calls_super(ranks, launch_first):
    expected = ["better", ("Better", 2, 2, True)], 1
    assert ranks.run(run_of_a_subclass, launch_first, world_size=2) == [expected, expected]


# callbacks and loggers


class Recorder:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def on_end(self, *args, **kwargs):
        self.log.append((self.name, args, kwargs))

    not_a_method = 3


class Other:
    pass


def test_call_goes_through_the_callbacks_in_order():
    log = []
    fabric = Fabric(accelerator="cpu", callbacks=[Recorder("first", log), Other(), Recorder("second", log)])
    fabric.call("on_end", 1, key=2)
    assert log == [("first", (1,), {"key": 2}), ("second", (1,), {"key": 2})]
    fabric.call("on_something_else")
    assert len(log) == 2


def test_one_callback_needs_no_list():
    log = []
    Fabric(accelerator="cpu", callbacks=Recorder("only", log)).call("on_end")
    assert [name for name, *_ in log] == ["only"]


def test_a_callback_that_is_no_method_is_named():
    fabric = Fabric(accelerator="cpu", callbacks=[Recorder("one", [])])
    with pytest.warns(UserWarning, match=r"Recorder\.not_a_method is not a method"):
        fabric.call("not_a_method")


def test_setup_looks_at_its_own_model_not_at_all_before_it(fabric, monkeypatch):
    earlier, later = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fabric.setup(earlier, torch.optim.SGD(earlier.parameters()))
    monkeypatch.setattr(earlier, "parameters", None)
    fabric.setup(later, torch.optim.SGD(later.parameters()))


def test_setup_tells_the_callbacks():
    seen = []

    class Watcher:
        def on_after_setup(self, fabric, module):
            seen.append((fabric, module))

    fabric = Fabric(accelerator="cpu", callbacks=Watcher())
    model = fabric.setup(torch.nn.Linear(1, 1))
    assert seen == [(fabric, model)]


def test_values_reach_every_logger(tmp_path):
    loggers = [CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="two")]
    fabric = Fabric(accelerator="cpu", loggers=loggers)
    assert fabric.logger is loggers[0]
    assert fabric.loggers == loggers
    fabric.log("loss", torch.tensor(0.5), step=0)
    fabric.log_dict({"loss": torch.tensor([0.25]), "lr": 0.1}, step=1)
    for logger in loggers:
        logger.save()
        with open(f"{logger.log_dir}/metrics.csv") as file:  # noqa: PTH123
            rows = list(csv.DictReader(file))
        assert rows == [{"step": "0", "loss": "0.5", "lr": ""}, {"step": "1", "loss": "0.25", "lr": "0.1"}]


def test_the_shape_of_all_gather_on_one_process_is_noted_once(capsys):
    exchange._log_shape_once.cache_clear()
    fabric = Fabric(accelerator="cpu", devices=1)
    for sync_grads in (False, True):
        assert fabric.all_gather(torch.zeros(1, 64, 3), sync_grads=sync_grads).shape == (1, 1, 64, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "fabric: all_gather adds a first dimension of size world_size, on one process, too"
    )


def test_one_logger_needs_no_list(tmp_path):
    logger = CSVLogger(tmp_path)
    assert Fabric(accelerator="cpu", loggers=logger).loggers == [logger]


def print_on_ranks():
    import contextlib
    import io

    fabric = of_two()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        fabric.print("rank", fabric.global_rank, sep="-", end="!")
    return out.getvalue()


def test_print_on_the_first_rank_only(ranks):
    assert ranks.run(print_on_ranks, world_size=2) == ["rank-0!", ""]


def log_on_ranks(folder):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=CSVLogger(folder))
    fabric.launch()
    fabric.log("loss", float(fabric.global_rank), step=3)
    fabric.logger.save()
    fabric.barrier()


def test_only_rank_zero_writes(ranks, tmp_path):
    ranks.run(log_on_ranks, str(tmp_path), world_size=2)
    files = list(tmp_path.rglob("metrics.csv"))
    assert len(files) == 1
    assert files[0].read_text().split() == ["step,loss", "3,0.0"]


# devices, dtypes, contexts


def test_to_device(fabric):
    module, tensor = torch.nn.Linear(1, 1), torch.ones(1)
    assert fabric.to_device(module) is module
    moved = fabric.to_device({"a": [tensor, "text"], "b": (1, None)})
    assert moved == {"a": [tensor, "text"], "b": (1, None)}


def test_to_device_moves():
    fabric = Fabric(accelerator="cpu")
    fabric.strategy.topology = type(fabric.strategy.topology)(device=torch.device("meta"))
    assert fabric.to_device(torch.ones(2)).device.type == "meta"
    assert fabric.to_device([{"x": torch.ones(2)}])[0]["x"].device.type == "meta"
    module = torch.nn.Linear(1, 1)
    assert fabric.to_device(module).weight.device.type == "meta"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("64-true", torch.float64),
        ("16-true", torch.float16),
        ("bf16-true", torch.bfloat16),
        ("bf16-mixed", torch.float32),
    ],
)
def test_what_is_made_inside_the_contexts(precision, dtype):
    fabric = Fabric(accelerator="cpu", precision=precision)
    with fabric.init_tensor():
        tensor = torch.ones(2)
    with fabric.init_module():
        module = torch.nn.Linear(2, 2)
    assert tensor.dtype == module.weight.dtype == dtype
    assert torch.ones(1).dtype is torch.float32, "and not after them"


def test_where_things_are_made():
    fabric = Fabric(accelerator="cpu")
    fabric.strategy.topology = type(fabric.strategy.topology)(device=torch.device("meta"))
    with fabric.init_tensor():
        assert torch.ones(1).device.type == "meta"
    with fabric.init_module():
        assert torch.nn.Linear(1, 1).weight.device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_what_empty_init_leaves_without_values_is_seen_in_the_first_loss(fabric):
    def build():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4))

    with fabric.init_module(empty_init=True):
        model = build()
        counts = torch.nn.init.ones_(torch.empty(2, dtype=torch.long))
    model = fabric.setup(model)
    assert all([p.isnan().all() for p in model.parameters()])
    assert model(torch.ones(2, 4)).sum().isnan()
    assert counts.dtype == torch.long
    model.load_state_dict(build().state_dict())
    assert model(torch.ones(2, 4)).sum().isfinite()


def test_autocast():
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    x = torch.ones(2, 2)
    with fabric.autocast():
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32
    with Fabric(accelerator="cpu").autocast():
        assert (x @ x).dtype is torch.float32


def test_sharded_model_is_a_context(fabric):
    with fabric.sharded_model():
        assert torch.nn.Linear(1, 1).weight.dtype is torch.float32


# the loop


def stepped(fabric):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.arange(6.0).view(2, 3)).pow(2).sum())
    return module, model, optimizer


def test_clipping_to_a_norm_gives_the_norm_before(fabric):
    module, model, optimizer = stepped(fabric)
    before = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    torch.testing.assert_close(norm, before)
    after = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-4, atol=0)


def test_clipping_to_a_norm_of_another_kind(fabric):
    module, model, optimizer = stepped(fabric)
    largest = max(p.grad.abs().max() for p in module.parameters())
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e9, norm_type="inf")
    assert norm == largest


def test_clipping_values_before_any_backward(fabric):
    model = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert fabric.clip_gradients(model, optimizer, clip_val=0.01) is None


def test_clipping_values(fabric):
    module, model, optimizer = stepped(fabric)
    assert fabric.clip_gradients(model, optimizer, clip_val=0.01) is None
    assert all(p.grad.abs().max() <= 0.01 for p in module.parameters())
    assert any(p.grad.abs().max() == 0.01 for p in module.parameters())


def test_gradients_that_are_not_finite(fabric):
    module, model, optimizer = stepped(fabric)
    module.weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()


def test_backward_passes_its_arguments_on(fabric):
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    fabric.backward(y, torch.tensor([1.0, 2.0]), retain_graph=True)
    fabric.backward(y, gradient=torch.tensor([1.0, 1.0]))
    assert x.grad.tolist() == [6.0, 9.0]


def test_the_state_of_a_fabric_before_launch_pickles():
    copy = pickle.loads(pickle.dumps(Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")))
    assert copy.world_size == 2


# seeds


def draws():
    import numpy as np

    return random.random(), float(np.random.rand()), torch.rand(1).item()


def seeded_draws(per_rank):
    fabric = of_two()
    results = []
    for _ in range(2):
        assert fabric.seed_everything(7, verbose=False, per_rank=per_rank) == 7
        results.append(draws())
    import os

    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        del os.environ[name]
    return results


def test_ranks_are_seeded_alike(ranks):
    (first, again), (other, _) = ranks.run(seeded_draws, False, world_size=2)
    assert first == again == other


def test_ranks_are_seeded_apart_on_demand(ranks):
    (first, again), (other, other_again) = ranks.run(seeded_draws, True, world_size=2)
    assert first == again
    assert other == other_again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_ranks_are_not_seeded_apart_before_there_are_any():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    with pytest.raises(RuntimeError, match=r"seed_everything\(per_rank=True\) was used before fabric.launch"):
        fabric.seed_everything(7, per_rank=True)  # all forked ranks would draw as rank zero


def test_a_backward_before_launch_is_refused():
    loss = torch.ones(1, requires_grad=True).sum()
    with pytest.raises(RuntimeError, match=r"backward\(\) was used before fabric.launch"):
        Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").backward(loss)


def test_the_verb_and_the_function_seed_alike(fabric):
    fabric.seed_everything(3, verbose=False)
    first = draws()
    seed_everything(3, verbose=False)
    assert draws() == first


def test_the_seed_is_read_from_the_environment(fabric, monkeypatch):
    monkeypatch.setenv("FABRIC_GLOBAL_SEED", "11")
    assert fabric.seed_everything(verbose=False) == 11


# saving and loading go through the strategy (see tests of it); here: the verbs themselves


def test_save_and_load(fabric, tmp_path):
    module, model, optimizer = stepped(fabric)
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    fabric.save(tmp_path / "c.pt", state)
    weight = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.zero_()
    rest = fabric.load(tmp_path / "c.pt", {"model": model})
    assert torch.equal(module.weight, weight)
    assert rest["epoch"] == 3
    assert set(fabric.load(tmp_path / "c.pt")) == {"model", "optimizer", "epoch"}
    torch.save(module.state_dict(), tmp_path / "raw.pt")
    with torch.no_grad():
        module.weight.zero_()
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert torch.equal(module.weight, weight)
