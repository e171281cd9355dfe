import argparse
import copy
import csv
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.loggers import CSVLogger, Logger
from fabric.utilities.cloud_io import join_path, read_text
from fabric.utilities.rank_zero import rank_zero_only


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """An empty directory on each kind of storage."""
    if request.param == "local":
        yield tmp_path
        return
    yield "memory://logs"
    MemoryFileSystem().rm("/logs", recursive=True)


def rows(logger):
    text = read_text(join_path(logger.log_dir, "metrics.csv"))
    return None if text is None else list(csv.DictReader(io.StringIO(text)))


def test_directories_and_versions(tmp_path):
    logger = CSVLogger(tmp_path)
    assert isinstance(logger, Logger)
    assert (logger.name, logger.version, logger.root_dir) == ("lightning_logs", 0, str(tmp_path))
    assert logger.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert list(tmp_path.iterdir()) == []  # nothing was logged
    (tmp_path / "lightning_logs" / "version_9").mkdir(parents=True)
    (tmp_path / "lightning_logs" / "version_x").mkdir()
    assert logger.version == 0
    assert CSVLogger(tmp_path).version == 10
    assert CSVLogger(tmp_path, name=None, version="mine").log_dir == str(tmp_path / "mine")
    assert CSVLogger(tmp_path, name="a", version=3).log_dir == str(tmp_path / "a" / "version_3")


def test_the_experiment_knows_its_file(tmp_path):
    logger = CSVLogger(tmp_path)
    assert logger.experiment.metrics_file_path == join_path(logger.log_dir, "metrics.csv")


def test_rows_are_complete_after_save_and_finalize(root):
    logger = CSVLogger(root)
    logger.log_metrics({"loss": torch.tensor(0.5), "acc": 1}, step=3)
    assert rows(logger) is None
    logger.save()
    assert rows(logger) == [{"step": "3", "loss": "0.5", "acc": "1"}]
    logger.log_metrics({"loss": 0.25, "acc": 2})
    logger.finalize("success")
    assert rows(logger)[1] == {"step": "1", "loss": "0.25", "acc": "2"}
    logger.save()
    assert len(rows(logger)) == 2


def test_columns_may_grow_and_old_rows_stay(root):
    logger = CSVLogger(root, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 'text, with "quotes"\nand lines'}, step=0)
    logger.log_metrics({"b": 2.0}, step=1)
    logger.log_metrics({"c": 3, "a": 4}, step=2)
    assert rows(logger) == [
        {"step": "0", "a": 'text, with "quotes"\nand lines', "b": "", "c": ""},
        {"step": "1", "a": "", "b": "2.0", "c": ""},
        {"step": "2", "a": "4", "b": "", "c": "3"},
    ]


def test_a_name_with_a_line_break_is_a_column(root):
    logger = CSVLogger(root, flush_logs_every_n_steps=1)
    logger.log_metrics({'loss, of "a"\nand b': 1}, step=0)
    logger.log_metrics({"c": 2}, step=1)
    logger.log_metrics({"c": 3}, step=2)
    assert [row["c"] for row in rows(logger)] == ["", "2", "3"]
    assert rows(logger)[0]['loss, of "a"\nand b'] == "1"


def test_flushes_by_itself(root):
    logger = CSVLogger(root, flush_logs_every_n_steps=2)
    counts = []
    for step in range(5):
        logger.log_metrics({"a": step}, step)
        counts.append(len(rows(logger) or []))
    assert counts == [0, 2, 2, 4, 4]


def test_prefix(tmp_path):
    logger = CSVLogger(tmp_path, prefix="train")
    logger.log_metrics({"loss": 1}, 0)
    logger.save()
    assert list(rows(logger)[0]) == ["step", "train-loss"]


def test_explicit_version_goes_on_with_its_file(root):
    for step, name in enumerate(["a", "a", "b"]):
        logger = CSVLogger(root, version=4)
        logger.log_metrics({name: 1}, step)
        logger.finalize("success")
    assert [row["step"] for row in rows(logger)] == ["0", "1", "2"]
    assert rows(logger)[2] == {"step": "2", "a": "", "b": "1"}


def test_one_that_is_loaded_goes_on_with_its_run_and_its_steps(root, tmp_path):
    def loop(logger, *given):
        fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
        state = {"logger": logger}
        if given:
            fabric.load(tmp_path / "a.pt", state)
        fabric.log("a", 1)
        fabric.log("a", 2)
        fabric.save(tmp_path / "a.pt", state)
        logger.save()
        return logger

    steps = [row["step"] for row in rows(loop(CSVLogger(root)))]
    again = loop(CSVLogger(root), "resumed")
    assert again.version == 0
    assert [row["step"] for row in rows(again)] == [*steps, "2", "3"] == ["0", "1", "2", "3"]
    given = loop(CSVLogger(root, version="mine"), "resumed")
    assert [row["step"] for row in rows(given)] == ["4", "5"]
    assert [row["step"] for row in rows(loop(CSVLogger(root, version=0)))][4:] == ["0", "1"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_in_the_same_file_without_repeating_rows(tmp_path, copied):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    other = copied(logger)
    assert other.log_dir == logger.log_dir
    logger.save()
    other.log_metrics({"b": 2}, 1)
    other.save()
    assert [row["step"] for row in rows(logger)] == ["0", "1"]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "_rank", 1)
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    logger.experiment.anything(3)
    logger.experiment["x"] = logger.experiment["y"].also(4)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.rglob("*")) == []


def test_forgotten_rows_are_written_when_the_logger_goes(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1}, 0)
    del logger
    assert rows(CSVLogger(tmp_path, version=0)) == [{"step": "0", "a": "1"}]


def test_forgotten_rows_are_written_at_exit_but_not_by_forked_children(tmp_path):
    code = f"""
import os, sys
from fabric.loggers import CSVLogger
logger = CSVLogger({str(tmp_path)!r}, version=0)
logger.log_metrics({{"a": 1}}, 0)
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert rows(CSVLogger(tmp_path, version=0)) == [{"step": "0", "a": "1"}]


def test_values_that_are_no_numbers(tmp_path):
    logger = CSVLogger(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'loss' has shape \(2,\)"):
        logger.log_metrics({"loss": torch.ones(2)}, 0)
    with pytest.raises(ConfigurationError, match="flush_logs_every_n_steps=0"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_local_logging_loads_no_remote_storage():
    code = """
import os, sys, tempfile
from fabric.loggers import CSVLogger
with tempfile.TemporaryDirectory() as root:
    logger = CSVLogger(root)
    logger.log_metrics({"a": 1})
    logger.save()
    assert "fsspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONWARNINGS": ""})


def test_hyperparameters_stand_beside_the_table(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 1, "path": tmp_path, "deep": {"a": [1]}})
    logger.log_hyperparams(argparse.Namespace(lr=2, deep={"a": [1]}))
    written = json.loads((Path(logger.log_dir) / "hparams.json").read_text())
    assert written == {"lr": 2, "deep": {"a": [1]}}
