"""Names of Lightning Fabric 2.6 that programs import, from the modules where they import them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from machine import ACCELERATOR
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from fabric import Fabric, is_wrapped
from fabric.core import lightning_names
from fabric.core._torch import is_fsdp
from fabric.core.errors import ConfigurationError, MissingExtraError, UsageError
from fabric.loggers import CSVLogger
from fabric.strategies import FSDPStrategy
from fabric.wrappers import _unwrap_objects

# Each line is a module and names, as Lightning Fabric 2.6.6 has them.
NAMES = """
accelerators TPUAccelerator XLAAccelerator
accelerators.cuda is_cuda_available num_cuda_devices
accelerators.registry call_register_accelerators _AcceleratorRegistry
accelerators.xla XLAAccelerator _XLA_AVAILABLE _using_pjrt
connector _PLUGIN_INPUT _PRECISION_INPUT
loggers.csv_logs CSVLogger
loggers.tensorboard _TENSORBOARDX_AVAILABLE _TENSORBOARD_AVAILABLE
plugins DeepSpeedPrecision XLACheckpointIO XLAPrecision
plugins.collectives.torch_collective default_pg_timeout
plugins.environments XLAEnvironment
plugins.environments.lightning LightningEnvironment find_free_network_port
plugins.environments.slurm _is_slurm_interactive_mode
plugins.environments.xla XLAEnvironment
plugins.io XLACheckpointIO
plugins.io.xla XLACheckpointIO
plugins.precision DeepSpeedPrecision XLAPrecision
plugins.precision.amp MixedPrecision
plugins.precision.bitsandbytes BitsandbytesPrecision _BITSANDBYTES_AVAILABLE
plugins.precision.deepspeed DeepSpeedPrecision
plugins.precision.double DoublePrecision
plugins.precision.fsdp FSDPPrecision
plugins.precision.half HalfPrecision
plugins.precision.precision _PRECISION_INPUT _PRECISION_INPUT_STR
plugins.precision.transformer_engine TransformerEnginePrecision
plugins.precision.utils _convert_fp_tensor
plugins.precision.xla XLAPrecision
strategies DeepSpeedStrategy SingleDeviceXLAStrategy XLAFSDPStrategy XLAStrategy _StrategyRegistry
strategies.deepspeed DeepSpeedStrategy _DEEPSPEED_AVAILABLE
strategies.launchers.launcher _Launcher
strategies.launchers.multiprocessing _MultiProcessingLauncher
strategies.launchers.subprocess_script _SubprocessScriptLauncher
strategies.registry _StrategyRegistry
strategies.single_xla SingleDeviceXLAStrategy
strategies.xla XLAStrategy
strategies.xla_fsdp XLAFSDPStrategy
utilities.apply_func apply_to_collection
utilities.cloud_io _atomic_save _is_dir _is_local_file_protocol _load
utilities.data _set_sampler_epoch
utilities.device_parser _parse_gpu_ids
utilities.distributed ReduceOp group _distributed_is_initialized _gather_all_tensors _sync_ddp_if_available
utilities.distributed _get_default_process_group_backend_for_device
utilities.imports _IS_INTERACTIVE _IS_WINDOWS _NUMPY_AVAILABLE _PYTHON_GREATER_EQUAL_3_10_0 _TORCH_EQUAL_2_4_0
utilities.imports _TORCHMETRICS_GREATER_EQUAL_1_0_0 _TORCH_GREATER_EQUAL_2_0 _TORCH_GREATER_EQUAL_2_1
utilities.imports _TORCH_GREATER_EQUAL_2_2 _TORCH_GREATER_EQUAL_2_3 _TORCH_GREATER_EQUAL_2_4
utilities.imports _TORCH_GREATER_EQUAL_2_4_1 _TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6
utilities.imports _TORCH_LESS_EQUAL_2_6
utilities.load _NotYetLoadedTensor _lazy_load
utilities.logger _add_prefix _convert_params _flatten_dict _sanitize_params
utilities.rank_zero rank_prefixed_message
utilities.registry _load_external_callbacks
utilities.seed _collect_rng_states _set_rng_states
utilities.types CollectibleGroup ProcessGroup _DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH _Stateful
wrappers _unwrap_compiled
"""
PATHS = [
    (f"fabric.{module}", name)
    for module, *names in map(str.split, NAMES.strip().splitlines())
    for name in names
]
INSTEAD = {
    ("fabric.strategies.fsdp", "_get_sharded_state_dict_context"): "Write model.module.state_dict()",
    ("fabric.strategies.fsdp", "_get_full_state_dict_context"): "Write model.state_dict() on all ranks",
    ("fabric.strategies.model_parallel", "_load_checkpoint"): "Write fabric.load(path, {'model': model})",
}
ENGINES = {"bitsandbytes", "deepspeed", "libtpu", "torch_tpu", "torch_xla", "transformer_engine"}


def given(module, name):
    """As `from module import name` gives it."""
    space = {}
    exec(f"from {module} import {name}", space)
    return space[name]


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_imports(module, name):
    found = given(module, name)
    assert getattr(import_module(module), name) is found
    expected = (
        bool if name.endswith(("_AVAILABLE", "_WINDOWS", "_INTERACTIVE")) or "EQUAL" in name else object
    )
    assert isinstance(found, expected)


@pytest.mark.parametrize(("module", "name"), INSTEAD)
def test_a_name_without_counterpart_says_what_to_write(module, name):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}'") as caught:
        given(module, name)
    assert INSTEAD[module, name] in str(caught.value)


def test_every_row_of_the_table_is_tested():
    rows = {
        (f"fabric.{module}", name)
        for module, homes in lightning_names._HOMES.items()
        for names in homes.values()
        for name in names.split()
        if name != "*"
    }
    assert rows <= set(PATHS)
    assert {f"{module}.{name}" for module, name in INSTEAD} == {
        f"fabric.{key}" for key in lightning_names._INSTEAD
    }


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'fabric\.utilities\.seed' has no attribute '_no_such'$"):
        import_module("fabric.utilities.seed")._no_such  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name '_no_such'"):
        given("fabric.strategies.xla", "_no_such")
    assert not hasattr(import_module("fabric.wrappers"), "__path__")


def test_names_cost_nothing_until_they_are_imported():
    """`import fabric` loads what it did, and all of the names import no engine."""
    code = f"""
import json, sys
import fabric
first = sorted(name for name in sys.modules if name.startswith("fabric"))
from fabric import Fabric
table = "fabric.core.lightning_names" in sys.modules
from importlib import import_module
for module, name in {PATHS!r}:
    getattr(import_module(module), name)
print(json.dumps([first, table, sorted({ENGINES!r} & {{name.partition(".")[0] for name in sys.modules}})]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first = ["fabric", *[f"fabric.core{name}" for name in ("", ".errors", ".lazy", ".torch_versions")]]
    assert json.loads(done.stdout) == [first, False, []]


# classes whose engine is missing

XLA = {
    "strategies.XLAStrategy": "accelerator='tpu', strategy='ddp'",
    "strategies.XLAFSDPStrategy": "accelerator='tpu', strategy='fsdp'",
    "strategies.SingleDeviceXLAStrategy": "accelerator='tpu', strategy='single_device'",
    "plugins.XLAPrecision": "accelerator='tpu', precision='bf16-true'",
    "plugins.XLACheckpointIO": "accelerator='tpu'",
    "plugins.environments.XLAEnvironment": "accelerator='tpu'",
    "accelerators.XLAAccelerator": "accelerator='tpu'",
}


@pytest.mark.parametrize("path", XLA)
def test_classes_of_torch_xla(path):
    module, _, name = f"fabric.{path}".rpartition(".")
    kind = given(module, name)
    f = Fabric(accelerator="cpu", devices=1)
    for part in (f.strategy, f.accelerator, f._precision, f.strategy.checkpoint_io):
        assert not isinstance(part, kind)
    with pytest.raises(ConfigurationError) as caught:
        kind("32-true", sync_module_states=True)
    assert str(caught.value) == (
        f"{name} is torch_xla's, whose last version (2.9) does not load with torch 2.10 or newer. Its "
        f"successor torch_tpu makes TPUs devices like any other: write {XLA[path]}, and run "
        '`pip install "torch-fabric[tpu]"`.'
    )


def test_questions_that_programs_ask_of_torch_xla():
    assert given("fabric.accelerators", "XLAAccelerator").is_available() is False
    assert given("fabric.accelerators", "XLAAccelerator").auto_device_count() == 0
    assert given("fabric.plugins.environments", "XLAEnvironment").detect() is False
    assert given("fabric.accelerators.xla", "_using_pjrt")() is False


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_deepspeed_is_asked_for_when_its_strategy_is_constructed():
    kind = given("fabric.strategies", "DeepSpeedStrategy")
    assert not isinstance(Fabric(accelerator="cpu", devices=1).strategy, kind)
    with pytest.raises(MissingExtraError, match=r"deepspeed, which is not installed.*fabric\[deepspeed\]"):
        kind(stage=2)


# helpers


def test_devices():
    cuda = import_module("fabric.accelerators.cuda")
    assert cuda.is_cuda_available() is (torch.cuda.device_count() > 0)
    assert cuda.num_cuda_devices() == torch.cuda.device_count()
    parse = given("fabric.utilities.device_parser", "_parse_gpu_ids")
    assert [parse(none, include_cuda=True) for none in (0, "0", [])] == [None] * 3
    with pytest.raises(ConfigurationError, match=r"devices=\[99\] cannot be"):
        parse([99], include_cuda=True)
    with pytest.raises(ConfigurationError, match="include_cuda=True"):
        parse(1)


def test_registries(monkeypatch):
    registry = given("fabric.accelerators.registry", "_AcceleratorRegistry")("accelerator", "fabric.none")
    given("fabric.accelerators.registry", "call_register_accelerators")(registry, "fabric.accelerators.cuda")
    assert "cuda" in registry.available_accelerators()
    assert isinstance(
        given("fabric.strategies", "STRATEGY_REGISTRY"), given("fabric.strategies", "_StrategyRegistry")
    )


def test_settings_of_loggers():
    logger = import_module("fabric.utilities.logger")
    convert, flatten, sanitize = logger._convert_params, logger._flatten_dict, logger._sanitize_params
    space = argparse.Namespace(a=1, b=argparse.Namespace(c=2))
    assert [convert(None), convert({"x": 1}), convert(space)] == [{}, {"x": 1}, vars(space)]
    data = dataclasses.make_dataclass("Data", [("x", int)])(1)
    nested = {"a": {"b": 1, "c": {"d": 2}}, 3: {"q": [1]}, "z": {}, "n": space, "d": data}
    assert flatten(nested) == {"a/b": 1, "a/c/d": 2, "3/q": [1], "n/a": 1, "n/b/c": 2, "d/x": 1}
    assert flatten({"a": {"b": 1}}, delimiter=".") == {"a.b": 1}
    assert [logger._add_prefix({"a": 1}, prefix, "-") for prefix in ("p", "")] == [{"p-a": 1}, {"a": 1}]
    assert flatten({"a": {"b": 1}}, "/", "p") == {"p/a/b": 1}
    numpy = pytest.importorskip("numpy")
    tensor = torch.ones(2)
    plain = {"a": 1, "b": 1.5, "c": True, "d": "s", "f": tensor}
    mixed = {**plain, "e": None, "h": [1], "n": numpy.float32(0.5), "o": numpy.bool_(True)}
    sanitized = sanitize(mixed)
    assert sanitized == {**plain, "e": "None", "h": "[1]", "n": 0.5, "o": True}
    assert sanitized["o"] is True


def test_random_states():
    collect, restore = (given("fabric.utilities.seed", f"_{verb}_rng_states") for verb in ("collect", "set"))
    for include in (True, False):
        states = collect(include_cuda=include)
        drawn = torch.rand(3)
        restore(states)
        assert torch.equal(torch.rand(3), drawn)
    assert {"python", "torch"} <= set(collect(include_cuda=False)) <= {"python", "torch", "numpy"}


def test_files(tmp_path):
    cloud = import_module("fabric.utilities.cloud_io")
    state = {"weight": torch.arange(4.0), "step": 3}
    cloud._atomic_save(state, tmp_path / "state.pt")
    loaded = given("fabric.utilities.load", "_lazy_load")(tmp_path / "state.pt")
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 3
    assert not isinstance(loaded["weight"], given("fabric.utilities.load", "_NotYetLoadedTensor"))
    assert list(tmp_path.iterdir()) == [tmp_path / "state.pt"]
    with (tmp_path / "state.pt").open("rb") as file:
        for source in (file, tmp_path / "state.pt", str(tmp_path / "state.pt")):
            assert torch.equal(cloud._load(source, map_location="cpu")["weight"], state["weight"])
    torch.save(state, tmp_path / "plain.pt")  # by hand
    assert torch.equal(
        given("fabric.utilities.load", "_lazy_load")(tmp_path / "plain.pt")["weight"], state["weight"]
    )
    system = cloud.get_filesystem(tmp_path)
    assert [cloud._is_dir(system, path) for path in (tmp_path, tmp_path / "state.pt")] == [True, False]
    paths = ("a/b", "/x", "file:///x", "s3://x", "memory://q")
    assert [cloud._is_local_file_protocol(path) for path in paths] == [True, True, True, False, False]


def test_tensors_and_modules():
    convert = given("fabric.plugins.precision.utils", "_convert_fp_tensor")
    assert [convert(torch.ones(1, dtype=d), torch.bfloat16).dtype for d in (torch.float32, torch.int32)] == [
        torch.bfloat16,
        torch.int32,
    ]
    net, unwrap = nn.Linear(1, 1), given("fabric.wrappers", "_unwrap_compiled")
    assert unwrap(net) == (net, None)
    assert unwrap(torch.compile(net, backend="eager")) == (net, {})
    apply = given("fabric.utilities.apply_func", "apply_to_collection")
    assert apply({"a": 1, "b": "x"}, int, lambda number: number + 1) == {"a": 2, "b": "x"}
    assert given("fabric.utilities.rank_zero", "rank_prefixed_message")("hi", 3) == "[rank: 3] hi"
    assert given("fabric.utilities.rank_zero", "rank_prefixed_message")("hi", None) == "hi"


def test_started_processes(monkeypatch):
    interactive = given("fabric.plugins.environments.slurm", "_is_slurm_interactive_mode")
    for name, expected in (("bash", True), ("interactive", True), ("train", False)):
        monkeypatch.setenv("SLURM_JOB_NAME", name)
        assert interactive() is expected
    assert 1024 <= given("fabric.plugins.environments.lightning", "find_free_network_port")() < 2**16
    f = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    launcher = f.strategy.launcher
    assert isinstance(
        launcher, given("fabric.strategies.launchers.multiprocessing", "_MultiProcessingLauncher")
    )
    assert isinstance(launcher, given("fabric.strategies.launchers.launcher", "_Launcher"))
    script = given("fabric.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")
    assert isinstance(Fabric(accelerator="cpu", devices=2, strategy="ddp").strategy.launcher, script)


def test_callbacks_of_other_distributions(monkeypatch, tmp_path):
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ours.callbacks]\none = plugin_of_a_test:one\nmany = plugin_of_a_test:many\n"
    )
    (tmp_path / "plugin_of_a_test.py").write_text("one = lambda: 'a'\nmany = lambda: ['b', 'c']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load = given("fabric.utilities.registry", "_load_external_callbacks")
    assert sorted(load("ours.callbacks")) == ["a", "b", "c"]
    assert load("nobody.has.it") == []


class Epochs:
    """A sampler that is told its epoch."""

    epoch = None

    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_the_epoch_of_samplers():
    choose, data = given("fabric.utilities.data", "_set_sampler_epoch"), TensorDataset(torch.arange(4))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    choose(loader, 5)
    assert loader.sampler.epoch == 5
    batches = torch.utils.data.BatchSampler(Epochs(), 2, drop_last=False)
    choose(DataLoader(data, batch_sampler=batches), 6)
    assert batches.sampler.epoch == 6
    choose(DataLoader(data, sampler=RandomSampler(data)), 7)  # has no epoch
    ready = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(data, shuffle=True))
    first, second = ([int(row) for (row,) in ready] for _ in range(2))
    choose(ready, 0)
    assert [int(row) for (row,) in ready] == first != second


def start(size, strategy="ddp"):
    f = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy)
    f.launch()
    return f


def reducing(size):
    f = start(size)
    helpers = import_module("fabric.utilities.distributed")
    own = float(f.global_rank + 1)
    named = {
        name: helpers._sync_ddp_if_available(torch.tensor(own, device=f.device), reduce_op=name).item()
        for name in (None, "sum", "mean", "AVG", "max")
    }
    uneven = torch.full((f.global_rank + 1, 2), own, device=f.device)
    gathered = [tensor.tolist() for tensor in helpers._gather_all_tensors(uneven)]
    whole = helpers._sync_ddp_if_available(torch.tensor([3, 3], device=f.device), helpers.group.WORLD)
    return named, gathered, whole.tolist(), helpers._distributed_is_initialized()


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_all_ranks(ranks, size):
    total, mean = sum(range(1, size + 1)), (size + 1) / 2
    named = {None: total, "sum": total, "mean": mean, "AVG": mean, "max": size}
    gathered = [[[rank + 1.0] * 2] * (rank + 1) for rank in range(size)]
    assert ranks.run(reducing, size, world_size=size) == [(named, gathered, [3 * size] * 2, True)] * size


def test_tensors_of_one_process():
    helpers, one = import_module("fabric.utilities.distributed"), torch.ones(2)
    assert helpers._distributed_is_initialized() is False
    assert helpers._sync_ddp_if_available(one, reduce_op="mean") is one
    assert helpers._gather_all_tensors(one) == [one]
    backend = helpers._get_default_process_group_backend_for_device
    assert [backend(torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]


# attributes of objects


class Lines(CSVLogger):
    """A logger of which two are alike only if they are one."""


def test_loggers(tmp_path):
    f = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(IndexError, match="this Fabric has no logger") as caught:
        f.logger  # noqa: B018
    assert isinstance(caught.value, UsageError)
    f._loggers = [logger := Lines(tmp_path)]
    assert f.logger is logger
    assert f.loggers == [logger]
    f.log("loss", 1.0)
    logger.save()
    assert "1.0" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_whether_it_is_launched():
    alone, several = (Fabric(accelerator="cpu", devices=d, strategy=s) for d, s in ((1, "auto"), (2, "ddp")))
    assert (alone._launched, several._launched) == (True, False)
    assert alone._validate_launched() is None
    with pytest.raises(UsageError, match=r"was used before fabric\.launch\(\)"):
        several._validate_launched()
    with pytest.raises(UsageError, match=r"was used before fabric\.launch\(\)"):
        several._setup_dataloader(DataLoader([1]))


def test_parts_of_fabric(tmp_path):
    f = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    assert f._precision is f.strategy.precision
    assert f._precision.precision == "bf16-mixed"
    loader = f._setup_dataloader(DataLoader(TensorDataset(torch.arange(4.0))), use_distributed_sampler=False)
    assert is_wrapped(loader)
    assert len(list(loader)) == 4
    net = nn.Linear(2, 1)
    model, optimizer = f.setup(net, made := torch.optim.SGD(net.parameters(), lr=0.1))
    unwrapped = _unwrap_objects({"model": model, "optimizers": [optimizer], "loader": loader, "step": 3})
    assert unwrapped["model"] is net
    assert unwrapped["optimizers"][0] is made
    assert type(unwrapped["loader"]) is DataLoader
    assert unwrapped["step"] == 3
    f.save(path := tmp_path / "state.pt", {"model": model})
    f.strategy.checkpoint_io.remove_checkpoint(path)
    assert not path.exists()


def of_ddp(size, how):
    f = start(size)
    f.strategy.barrier("all ranks")
    before = dict(f.strategy._ddp_kwargs)
    if how == "an entry":
        f.strategy._ddp_kwargs["bucket_cap_mb"] = 3
    else:
        f.strategy._ddp_kwargs = {"bucket_cap_mb": 3}
    model = f.setup(nn.Linear(2, 1))
    return before, model._forward_module.bucket_bytes_cap


@pytest.mark.parametrize(("how", "size"), [("an entry", 2), ("all", 3)])
def test_keywords_of_ddp_may_be_set_before_setup(ranks, how, size):
    assert ranks.run(of_ddp, size, how, world_size=size) == [({}, 3 * 2**20)] * size


def of_fsdp(size, keywords):
    f = Fabric(accelerator=ACCELERATOR, devices=size, strategy=FSDPStrategy(limit_all_gathers=True))
    f.launch()
    before = dict(f.strategy._fsdp_kwargs)
    f.strategy._fsdp_kwargs.update(keywords)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    try:
        f.setup(net)
    except ConfigurationError as error:
        return before, str(error)
    parts = [isinstance(value, DTensor) for value in net.state_dict().values()]
    assert all(parts), "as the ImportError of _get_sharded_state_dict_context says"
    return before, [name for name, part in net.named_modules() if is_fsdp(part)]


@pytest.mark.parametrize(
    ("keywords", "result"),
    [
        ({"auto_wrap_policy": {nn.Linear}}, ["", "0", "1.0", "1.1"]),
        ({"auto_wrap_policy": {nn.Sequential}}, ["", "1"]),
        ({"auto_wrap_polcy": {nn.Linear}}, "no keyword 'auto_wrap_polcy'. Did you mean 'auto_wrap_policy'?"),
        ({"use_orig_params": False}, "use_orig_params=False must be True"),
    ],
)
def test_keywords_of_fsdp_may_be_set_before_setup(ranks, keywords, result):
    size = 3 if isinstance(result, str) else 2
    for before, found in ranks.run(of_fsdp, size, keywords, world_size=size):
        assert before == {"limit_all_gathers": True, "auto_wrap_policy": None}
        assert found == result if isinstance(result, list) else result in found
