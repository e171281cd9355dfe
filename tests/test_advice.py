"""Errors of calls that people bring from other libraries, or get wrong: each says what to write instead."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core import advice
from fabric.core.errors import ArgumentTypeError, ConfigurationError, LaunchError, UsageError
from fabric.launch.rank_exit import RankExit, describe, root_cause


@pytest.fixture
def fabric():
    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    return made


def pair():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


NAMES = {
    "prepare": "model, optimizer = fabric.setup(model, optimizer)",
    "rank": "fabric.global_rank",
    "num_processes": "fabric.world_size",
    "is_main_process": "fabric.is_global_zero",
    "accumulate": "fabric.no_backward_sync",
    "unwrap_model": "model.module",
    "wait_for_everyone": "fabric.barrier()",
    "gather_for_metrics": 'fabric.all_gather(x, uneven="cat")',
    "save_state": "fabric.save(path",
    "set_trigger": "fabric.any(flag)",
    "end_training": "Delete the call: a job ends with its script.",
    "allreduce": "fabric.all_reduce(x)",
    "bariier": "Did you mean 'barrier'?",
    "prepare_scheduler": "Schedulers need no setup: keep using yours.",
    "manual_backward": "fabric.backward(loss)",
    "broadcast_parameters": "it has already made all ranks equal",
    "scaler": 'Fabric(precision="16-mixed")',
    "global_step": "your own variable",
    "train": "model.train()",
    "fit": "your own loop",
    "cuda": "fabric.to_device(batch)",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_library(fabric, name):
    with pytest.raises(AttributeError, match=re.escape(NAMES[name])) as raised:
        getattr(fabric, name)
    assert raised.value.name == name
    assert f"'Fabric' object has no attribute {name!r}." in str(raised.value)


def test_each_advice_is_about_a_name_that_we_do_not_have():
    names = [name for names in advice._ATTRIBUTES.values() for name in names.split()]
    assert [name for name in names if hasattr(Fabric, name)] == []
    assert len(names) == len({*names}) > 90
    for text in advice._ATTRIBUTES:
        for verb in re.findall(r"\bfabric\.(\w+)", text):
            assert hasattr(Fabric, verb), text


WRAPPED = {
    ("model", "no_sync"): "Write `with fabric.no_backward_sync(model, enabled=not last):`",
    ("model", "clip_grad_norm_"): "Write fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ("model", "save_checkpoint"): "Write fabric.save(path, {",
    ("model", "summon_full_params"): "Write `with fabric.whole(model) as plain:`.",
    ("optimizer", "backward"): "Write fabric.backward(loss).",
    ("optimizer", "synchronize"): "Delete the call: the backward averages the gradients.",
    ("loader", "total_batch_size"): "It is loader.batch_size times the number of ranks",
}


@pytest.mark.parametrize(("kind", "name"), WRAPPED)
def test_an_attribute_of_another_wrapper(fabric, kind, name):
    model, optimizer = fabric.setup(*pair())
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 2))))
    holder = {"model": model, "optimizer": optimizer, "loader": loader}[kind]
    with pytest.raises(AttributeError, match=re.escape(WRAPPED[kind, name])) as raised:
        getattr(holder, name)
    assert raised.value.name == name
    assert f"has no attribute {name!r}." in str(raised.value)
    assert "\n\n" not in "".join(traceback.format_exception(raised.value)), "one error, not a chain"
    assert not hasattr(holder, name)
    for other in ("not_there", "_private"):
        with pytest.raises(AttributeError, match=f"has no attribute '{other}'$"):
            getattr(holder, other)


def test_each_advice_for_wrappers_is_about_a_name_that_they_do_not_have(fabric):
    model, optimizer = fabric.setup(*pair())
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 2))))
    for kind, holder in (("model", model), ("optimizer", optimizer), ("loader", loader)):
        names = " ".join(advice._WRAPPERS[kind].values()).split()
        assert [name for name in names if hasattr(holder, name)] == []
        for text in advice._WRAPPERS[kind]:
            for verb in re.findall(r"\bfabric\.(\w+)", text):
                assert hasattr(Fabric, verb), text


def test_what_a_property_of_the_model_raises_is_not_replaced(fabric):
    class Model(nn.Linear):
        @property
        def no_sync(self):
            raise AttributeError("of the property") from KeyError("its cause")

    model = fabric.setup(Model(2, 2))
    with pytest.raises(AttributeError, match=r"no_sync|of the property") as raised:
        _ = model.no_sync
    assert "Write" not in str(raised.value)


def test_functions_of_the_first_fsdp(fabric):
    model = fabric.setup(pair()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            pytest.raises(KeyError) as raised,
            FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT),
        ):
            pass
    assert "write fabric.save(path, {" in describe(raised.value)
    assert describe(KeyError(None)) == "KeyError: None"


def test_what_a_property_raises_is_not_hidden():
    class Broken(Fabric):
        @property
        def part(self):
            raise AttributeError("inside")

    made = Broken(accelerator="cpu", devices=1)
    with pytest.raises(AttributeError, match=r"^inside$"):
        made.part  # noqa: B018
    assert not hasattr(made, "_nothing")
    assert getattr(made, "nothing", 3) == 3


ARGUMENTS = {
    "gpus": 'Write accelerator="gpu", devices=2.',
    "n_gpus": 'Write accelerator="gpu", devices=2.',
    "num_ranks": "Write devices=2.",
    "mixed_precision": 'precision="bf16-mixed"',
    "logger": 'Write loggers=fabric.loggers.CSVLogger("logs").',
    "gradient_accumulation_steps": "fabric.no_backward_sync",
    "fsdp_plugin": "strategy=FSDPStrategy(...)",
    "devicez": "Did you mean devices=?",
    "qqq": "It takes accelerator, strategy, devices, num_nodes",
    "fast_dev_run": "your own loop",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "compile": "fabric.setup(torch.compile(model), optimizer)",
    "tp_size": "strategy=ModelParallelStrategy(parallelize_fn)",
    "timeout": "strategy=DDPStrategy(timeout=timedelta(minutes=30))",
    "rank": "Delete it: the launcher gives each process its rank.",
    "model": "fabric.setup(model, optimizer)",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_library(name):
    with pytest.raises(ArgumentTypeError, match=re.escape(ARGUMENTS[name])) as raised:
        Fabric(**{name: 2})
    assert str(raised.value).startswith(f"Fabric({name}=...): there is no such argument.")


def test_a_type_error_inside_of_a_call_stays():
    class Odd(Fabric):
        def __init__(self):
            super().__init__(accelerator="cpu", devices=1, loggers=self)

        def log_metrics(self):
            raise TypeError("mine")

    Odd()
    with pytest.raises(ArgumentTypeError, match=r"^Fabric\('gpu'\): arguments are keywords"):
        Fabric("gpu")


def test_kinds_of_arguments_of_setup(fabric):
    model, optimizer = pair()
    loader = DataLoader(TensorDataset(torch.ones(2)))
    for call, text in (
        (lambda: fabric.setup(optimizer, model), "got Linear. Set each model up by a call of its own"),
        (lambda: fabric.setup(optimizer), "The model is the first argument: fabric.setup(model, optimizer)."),
        (lambda: fabric.setup([model], optimizer), "Set each model up by a call of its own"),
        (lambda: fabric.setup(model, [optimizer]), "Unpack it: fabric.setup(model, *optimizers)."),
        (lambda: fabric.setup_optimizers([optimizer]), "Unpack it: fabric.setup_optimizers(*optimizers)."),
        (lambda: fabric.setup(model, optimizer, loader), "loader = fabric.setup_dataloaders(loader)"),
        (lambda: fabric.setup(nn.Linear), "make an object of it, Linear(...)"),
        (lambda: fabric.setup(model, optimizer=optimizer), "optimizers are positional"),
        (lambda: fabric.setup(model, optimizers=optimizer), "optimizers are positional"),
        (lambda: fabric.setup(model, move=True), "there is no such argument. Did you mean module=?"),
        (lambda: fabric.setup_dataloaders([loader]), "Unpack it: fabric.setup_dataloaders(*loaders)."),
        (lambda: fabric.setup_dataloaders({"a": loader}), "(*loaders.values())"),
        (
            lambda: fabric.setup_dataloaders(loader.dataset),
            "DataLoader(dataset, batch_size",
        ),
    ):
        with pytest.raises(ArgumentTypeError, match=re.escape(text)):
            call()


VERBS = {
    "setup_dataloaders(loader, shuffle=True)": "Write it in DataLoader(dataset, ...), before setup",
    "setup_dataloaders(loader, use_distributed_sampler='no')": "sampler='no' must be True or False.",
    "setup_module(model, optimizer)": "move_to_device=SGD must be True or False. Write model, ",
    "setup_optimizers(model.parameters())": "got generator. Write for example torch.optim.Adam(",
    "setup_optimizers(torch.amp.GradScaler('cpu'))": "scales the loss: delete the scaler",
    "setup(model, None)": "got NoneType. Leave it out: fabric.setup(model).",
    "setup()": "missing a required argument: 'module'. Its arguments are fabric.setup(module, *",
    "load('a.pt', map_location='cpu')": "Delete it: values are loaded to the device of each object.",
    "load(model, 'a.pt')": 'needs a path, but got Linear. Write fabric.load(path, {"model": model}).',
    "save({}, 'a.pt')": 'needs a path, but got dict. Write fabric.save(path, {"model": model}).',
    "save('a.pt')": "missing a required argument: 'state'. Its arguments are fabric.save(path, state, ",
    "load_raw(model, 'a.pt')": "needs a path, but got Linear. Write fabric.load_raw(path, model).",
    "load_raw('a.pt', model, strict='no')": "fabric.load_raw: strict='no' must be True or False.",
    "all_reduce(1, op='sum')": 'Write reduce_op="sum", "mean"',
    "broadcast(1, root=0)": "Write src=0, the global rank that sends.",
    "all_gather(1, dim=0)": "fabric.all_gather(dim=...): there is no such argument. It takes data, group",
    "agree()": "missing a required argument: 'value'. Its arguments are fabric.agree(value).",
    "to_device('cpu', 1)": "too many positional arguments. Its arguments are fabric.to_device(obj).",
    "autocast('bf16')": "too many positional arguments. Its arguments are fabric.autocast().",
    "log({'loss': 1})": "one name and one value, but got dict. Write fabric.log_dict({name: value}).",
    "log('loss')": "missing a required argument: 'value'. Its arguments are fabric.log(name, value",
    "log_dict('loss', 1)": 'got str. Write fabric.log_dict({"loss": loss}), or fabric.log("loss", loss).',
    "call(print)": 'needs the name of a method, but got <built-in function print>. Write fabric.call("on_',
    "clip_gradients(model, max_norm=1.0)": "missing a required argument: 'optimizer'",
    "clip_gradients(model, optimizer, norm=1.0)": "Write max_norm=1.0 to scale the total norm",
    "clip_gradients(model, optimizer, max_norm='1')": "max_norm='1' must be a number",
    "clip_gradients(model, optimizer, max_norm=1.0, norm_type='l2')": "norm_type='l2' must be a number",
    "clip_gradients(model, 1.0)": "needs the model's optimizer, but got float",
    "backward((1,))": "got tuple. Write fabric.backward(sum(losses)).",
    "backward(None)": "got NoneType. Return the loss from the function that computes it.",
    "backward(model)": "Write loss = criterion(model(batch), target)",
    "backward({'nll': 1})": 'Write fabric.backward(out["nll"]).',
}


@pytest.mark.parametrize("call", VERBS)
def test_arguments_that_a_verb_does_not_take(fabric, call):
    model, optimizer = pair()
    names = {"fabric": fabric, "torch": torch, "model": model, "optimizer": optimizer}
    names["loader"] = DataLoader(TensorDataset(torch.ones(2)))
    with pytest.raises(ArgumentTypeError, match=re.escape(VERBS[call])):
        eval(f"fabric.{call}", names)


@pytest.mark.parametrize("limits", [{"max_norm": -1.0}, {"clip_val": float("nan")}])
def test_limits_that_would_turn_gradients_around(fabric, limits):
    ((name, value),) = limits.items()
    with pytest.raises(ConfigurationError, match=rf"{name}={value!r} must be 0 or more\. Write clip_val=0.5"):
        fabric.clip_gradients(*pair(), **limits)


def test_a_type_error_of_the_users_own_code_stays(fabric):
    class Odd(dict):
        def items(self):
            raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        fabric.log_dict(Odd(loss=1.0))


def test_each_advice_on_arguments_is_about_one_that_the_verb_does_not_have():
    for verb, table in {"Fabric": advice._ARGUMENTS, **advice._VERBS}.items():
        method = Fabric if verb == "Fabric" else getattr(Fabric, verb.removeprefix("fabric."))
        names = [name for names in table.values() for name in names.split()]
        assert len(names) == len({*names}), verb
        known = inspect.signature(method).parameters.values()
        assert {*names}.isdisjoint([one.name for one in known if one.kind is not one.VAR_POSITIONAL]), verb


def test_a_checkpoint_given_to_load_raw(fabric, tmp_path):
    model = fabric.setup(pair()[0])
    fabric.save(tmp_path / "one.pt", {"net": model, "epoch": 1})
    with pytest.raises(
        UsageError, match=r"has 'net', 'epoch' where .* Write fabric.load\(path, {'net': model}"
    ):
        fabric.load_raw(tmp_path / "one.pt", model)
    fabric.save(tmp_path / "two.pt", {"model": {"state_dict": model}})
    with pytest.raises(UsageError, match=r"Give {'state_dict': model} in place of the model\."):
        fabric.load(tmp_path / "two.pt", {"model": model})


def test_what_cannot_be_a_logger_or_a_callback():
    with pytest.raises(ArgumentTypeError, match=r"loggers='tensorboard' has no log_metrics.*CSVLogger"):
        Fabric(accelerator="cpu", devices=1, loggers="tensorboard")
    for given in (print, "x", 3, None, Fabric, lambda: 3):
        with pytest.raises(ArgumentTypeError, match=r"has no methods that fabric\.call"):
            Fabric(accelerator="cpu", devices=1, callbacks=[given])


def test_values_without_a_logger_are_warned_of_once(fabric):
    from fabric.checks import warn_of_no_logger

    warn_of_no_logger.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [fabric.log("loss", 1.0) for _ in range(3)] == [1.0] * 3
    assert ["has no logger, so that nothing is written" in str(one.message) for one in found] == [True]


def test_arguments_of_save_and_load(fabric, tmp_path):
    model, _ = fabric.setup(*pair())
    file = tmp_path / "state.pt"
    fabric.save(file, {"model": model})
    for call, error, text in (
        (lambda: fabric.load(file, model), ArgumentTypeError, "got Linear. Write fabric.load(path, {"),
        (lambda: fabric.save(file, model), ArgumentTypeError, "needs a dictionary, but state is a "),
        (lambda: fabric.load(file, {"model": model}, strict="no"), ArgumentTypeError, "strict='no' must be"),
        (lambda: fabric.load("", {"model": model}), ConfigurationError, "the path is empty"),
        (lambda: fabric.save("", {"model": model}), ConfigurationError, "the path is empty"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            call()


def test_arguments_of_clip_gradients(fabric):
    (model, optimizer), (other, others) = fabric.setup(*pair()), fabric.setup(*pair())
    free = fabric.setup_optimizers(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0) > 0
    assert fabric.clip_gradients(model, free, max_norm=1.0) == 0, "parameters of no model"
    clip = partial(fabric.clip_gradients, max_norm=1.0)
    for given, error, text in (
        ((model, others), ConfigurationError, "of another model"),
        ((model.parameters(), optimizer), ArgumentTypeError, "needs the model, but got generator"),
        ((model, other), ArgumentTypeError, "needs the model's optimizer, but got Linear"),
    ):
        with pytest.raises(error, match=text):
            clip(*given)


def test_losses_that_no_backward_starts_from(fabric):
    model = fabric.setup(pair()[0])
    x = torch.ones(1, 2)
    with torch.no_grad():
        flat = model(x).sum()
    used = model(x).pow(2).sum()
    fabric.backward(used)
    for loss, error, text in (
        ({"loss": used}, ArgumentTypeError, 'Write fabric.backward(out["loss"]).'),
        (3.0, ArgumentTypeError, "without .item()"),
        (flat, UsageError, "a loss that requires no gradient"),
        (model(x), UsageError, "a tensor of shape [1, 2]. A backward starts from one number"),
        (used, UsageError, "called twice on one graph"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            fabric.backward(loss)
    fabric.backward(model(x), torch.ones(1, 2))


def lazy_model():
    fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy="ddp")
    fabric.launch()
    with pytest.raises(UsageError, match=r"LazyLinear has parameters without a shape \(weight\)"):
        fabric.setup(nn.LazyLinear(2))
    with pytest.raises(ConfigurationError, match=r"use the first Fabric|do not call init_process_group"):
        Fabric(accelerator="cpu", devices=1)


def test_a_lazy_model_and_a_second_fabric_on_several_ranks(ranks):
    ranks.run(lazy_model, world_size=2)


def model_of_the_job(fabric):
    return fabric.setup(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_function_that_returns_a_model_of_its_job():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    with pytest.raises(LaunchError, match=r"Return model.module or its state_dict\(\)"):
        fabric.launch(model_of_the_job)


def saved_whole(path):
    fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy="ddp")
    fabric.launch()
    model = fabric.setup(nn.Linear(2, 2))
    if fabric.is_global_zero:
        torch.save(model, path)
    return copy.deepcopy(model).weight.shape, pickle.loads(pickle.dumps(model)).weight.shape


def test_a_model_that_was_pickled_whole_is_loaded_outside_of_its_job(ranks, fabric, tmp_path):
    for shapes in ranks.run(saved_whole, f"{tmp_path}/model.pt", world_size=2):
        assert shapes == ((2, 2), (2, 2))
    with pytest.raises(UsageError, match=r"Write torch\.save\(model\.module, path\) there, or fabric\.save"):
        torch.load(tmp_path / "model.pt", weights_only=False)
    torch.save(fabric.setup(nn.Linear(2, 2)), tmp_path / "alone.pt")
    assert torch.load(tmp_path / "alone.pt", weights_only=False).weight.shape == (2, 2)


def test_the_last_line_says_what_to_write():
    error = ValueError("trying to initialize the default process group twice!")
    assert describe(error).endswith("twice! (fabric.launch() has made it: delete the call)")
    waits = "RankError: save at train.py:18 failed on rank 0: rank 1 ended, or does not answer (train.py:18)"
    cause = root_cause([RankExit(1.0, waits, rank=0)], finished=[1])
    assert cause.reason.endswith("(train.py:18): is the call inside `if fabric.is_global_zero`?")


def test_a_spike_names_its_loss():
    from fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    fabric, watch = Fabric(accelerator="cpu", devices=1), SpikeDetection()
    watch._write_bad_batches = lambda: None
    watch.on_train_batch_end(fabric, torch.tensor(1.0), None, 0)
    with pytest.raises(TrainingSpikeException) as raised:
        watch.on_train_batch_end(fabric, torch.tensor(9.0), None, 1)
    text = "Training spike detected in batch 1! This rank's loss is 9, the mean of the last 1 was 1 "
    assert str(raised.value).startswith(text)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
