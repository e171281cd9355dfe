import copy
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from fabric.core.errors import ConfigurationError
from fabric.loggers import TensorBoardLogger
from fabric.utilities.rank_zero import rank_zero_only

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def scalars(logger, tag):
    return [(event.step, event.value) for event in events(logger.log_dir).Scalars(tag)]


@pytest.fixture
def logger(tmp_path):
    made = TensorBoardLogger(tmp_path)
    yield made
    made.finalize("success")


def test_directories(tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path, name="run", version=2, sub_dir="fold")
    assert logger.sub_dir == "fold"
    assert (logger.name, logger.version, logger.root_dir) == ("run", 2, str(tmp_path))
    assert logger.log_dir == str(tmp_path / "run" / "version_2" / "fold")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("SOMEWHERE", str(tmp_path))
    assert TensorBoardLogger("$SOMEWHERE/x", version="v", name="").log_dir == str(tmp_path / "x" / "v")


def test_metrics(logger):
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(2)}, step=1)
    logger.log_metrics({"loss": 0.25}, step=5)
    logger.log_metrics({"both": {"a": 1.0, "b": torch.tensor(2.0)}}, step=3)
    logger.save()
    assert scalars(logger, "loss") == [(1, 0.5), (5, 0.25)]
    assert scalars(logger, "acc") == [(1, 2.0)]
    lines = {part: events(f"{logger.log_dir}/both_{part}").Scalars("both")[0].value for part in "ab"}
    assert lines == {"a": 1.0, "b": 2.0}


def test_steps_that_are_not_given_are_counted_and_go_on_in_one_that_is_loaded(logger, tmp_path):
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"a": 1.0, "b": 2.0})
    logger.log_metrics({"a": 2.0}, 9)
    again = TensorBoardLogger(tmp_path)
    again.load_state_dict(logger.state_dict())
    again.log_metrics({"a": 3.0})
    for each in (logger, again):
        each.finalize("success")
    files = [events(file) for file in Path(again.log_dir).iterdir()]
    assert again.log_dir == logger.log_dir
    assert sorted((e.step, e.value) for file in files for e in file.Scalars("a")) == [(0, 1), (2, 3), (9, 2)]


def test_prefix(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="train")
    logger.log_metrics({"loss": 1}, 0)
    logger.finalize("success")
    assert scalars(logger, "train-loss") == [(0, 1.0)]


def test_logging_after_finalize_goes_on(logger):
    logger.log_metrics({"a": 1}, 0)
    logger.finalize("success")
    logger.log_metrics({"a": 2}, 1)
    logger.save()
    files = [events(file) for file in Path(logger.log_dir).iterdir()]
    assert sorted(event.value for file in files for event in file.Scalars("a")) == [1.0, 2.0]


@pytest.mark.parametrize("value", [object(), [1, 2], "text"])
def test_values_that_cannot_be_charted(logger, value):
    with pytest.raises(ConfigurationError, match="'x' is a"):
        logger.log_metrics({"x": value}, 0)


def test_tensor_of_several_elements(logger):
    with pytest.raises(ConfigurationError, match=r"'x' has shape \(3,\)"):
        logger.log_metrics({"x": torch.ones(3)}, 0)


def hparams_of(logger):
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = events(logger.log_dir).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in data.items()}


def test_settings_are_flattened_and_made_plain(logger):
    logger.log_hyperparams(
        {
            "lr": 0.5,
            "deep": {"a": True, "b": Namespace(c="x")},
            "layers": [1, 2],
            "none": None,
            "dtype": torch.float32,
            "scale": torch.tensor(2.0),
        }
    )
    logger.save()
    assert hparams_of(logger) == {
        "lr": 0.5,
        "deep/a": True,
        "deep/b/c": "x",
        "layers": "[1, 2]",
        "none": "None",
        "dtype": "torch.float32",
        "scale": 2.0,
    }
    assert scalars(logger, "hp_metric") == [(0, -1.0)]


@pytest.mark.parametrize(("metrics", "name"), [(3.0, "hp_metric"), ({"best": torch.tensor(3.0)}, "best")])
def test_settings_with_metrics(logger, metrics, name):
    logger.log_hyperparams(Namespace(lr=1), metrics, step=7)
    logger.save()
    assert scalars(logger, name) == [(7, 3.0)]
    assert hparams_of(logger) == {"lr": 1.0}


def test_no_default_metric(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 1})
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")  # tensorboard traces
def test_graph(logger):
    model = nn.Linear(2, 3)
    logger.log_graph(model, torch.ones(1, 2))
    logger.save()
    assert "addmm" in str(events(logger.log_dir).Graph()) or "linear" in str(events(logger.log_dir).Graph())


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")  # tensorboard traces
def test_graph_without_input_warns(logger):
    with pytest.warns(UserWarning, match="example_input_array"):
        logger.log_graph(nn.Linear(2, 3))
    model = nn.Linear(2, 3)
    model.example_input_array = torch.ones(1, 2)
    logger.log_graph(model)
    logger.save()
    assert events(logger.log_dir).Graph().node


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_write_to_the_same_directory(logger, copied):
    logger.log_metrics({"a": 1}, 0)
    logger.save()
    other = copied(logger)
    assert other.log_dir == logger.log_dir
    other.log_metrics({"b": 2}, 0)
    other.finalize("success")


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "_rank", 1)
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.log_graph(nn.Linear(1, 1), torch.ones(1, 1))
    logger.experiment.add_text("a", "b")
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.rglob("*")) == []


def test_a_home_stays_as_given_and_is_expanded_in_the_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PART", "validation")
    logger = TensorBoardLogger("~/logs", name="a", sub_dir="$PART")
    assert (logger.root_dir, logger.sub_dir) == ("~/logs", "$PART")
    assert logger.log_dir == str(tmp_path / "logs" / "a" / "version_0" / "validation")
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    assert TensorBoardLogger("~/logs", name="a").version == 1
