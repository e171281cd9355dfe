"""`WandbLogger` offline and `MLFlowLogger` on SQLite and in directories, read back from what is on disk."""

from __future__ import annotations

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.update(
    MLFLOW_DISABLE_TELEMETRY="true", WANDB_ERROR_REPORTING="false"
)  # nothing leaves this machine
import mlflow
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from fabric.utilities.rank_zero import rank_zero_only

pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).parents[3]
QUIET = {"console": "off", "silent": True}


@pytest.fixture(autouse=True)
def _no_service_stays():
    yield
    wandb.teardown()


def records(file):
    """What W&B has written, in blocks of 32 KiB: checksum, length, kind (whole, first, ..., last), data."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


class Offline:
    """The one run in `folder/wandb`."""

    def __init__(self, folder):
        wandb.teardown()  # its service has written all then
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        found = list(records(file))
        self.rows = [
            {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
            for r in found
            if r.HasField("history")
        ]
        self.config = {i.key: json.loads(i.value_json) for r in found for i in settings_of(r)}
        self.artifacts = {a.name: [e.path for e in a.manifest.contents] for a in artifacts_of(found)}
        self.runs = [r.run for r in found if r.HasField("run")]
        self.exits = [r.exit.exit_code for r in found if r.HasField("exit")]
        self.axes = {
            (m.name or m.glob_name): m.step_metric for m in (r.metric for r in found) if m.ByteSize()
        }

    def values(self, name):
        return [(row.get("step"), row[name]) for row in self.rows if name in row]


def settings_of(record):
    return [*record.run.config.update, *record.config.update]


def artifacts_of(found):
    requests = [r.request.log_artifact.artifact for r in found if r.HasField("request")]
    return [a for a in [*requests, *[r.artifact for r in found]] if a.ByteSize()]


def history(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run, name)]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_loop_on_two_ranks_is_one_run(tmp_path, strategy):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "a.txt").write_text("a")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("train.py")), str(tmp_path), strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)] == ["wandb mlflow", ""]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    key = run.info.run_id
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"lr": "0.1", "model/width": "4"}
    assert {file.path for file in client.list_artifacts(key)} == {"step=3.pt", "plots"}
    assert [file.path for file in client.list_artifacts(key, "plots")] == ["plots/a.txt"]

    offline = Offline(tmp_path)
    assert offline.runs[0].project == "tests"
    assert offline.runs[0].display_name == "first"
    assert offline.exits == [0]
    assert {name: offline.config[name] for name in ("lr", "model")} == {"lr": 0.1, "model": {"width": 4}}
    assert offline.axes["*"] == "step"
    for name in ("loss", "mean", "rank", "late"):
        in_mlflow = sorted(history(client, key, name))
        assert in_mlflow == sorted(offline.values(name)), name
        assert [step for step, _ in in_mlflow] == ([1] if name == "late" else [0, 1, 2])
    assert offline.values("rank") == [(step, 0.5) for step in range(3)]
    losses, means = (dict(offline.values(name)) for name in ("loss", "mean"))
    assert means[0] != losses[0], "the mean is over both ranks"


# Weights & Biases


def test_wandb_keeps_what_it_is_given(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, project="p", offline=True, prefix="a", settings=QUIET)
    assert (logger.name, logger.version, logger.root_dir) == ("p", None, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "nothing begins before something is logged"
    logger.log_metrics({"loss": torch.tensor([0.5]), "n": 3})
    logger.log_metrics({"loss": 0.25})
    with pytest.raises(ConfigurationError, match=r"'bad' has shape \(2,\) and is no scalar"):
        logger.log_metrics({"bad": torch.ones(2)})
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams({"lr": 0.2, "layers": [1, 2]})
    file = tmp_path / "epoch=1 of 3.pt"
    file.write_text("x")
    logger.log_artifact(file)
    assert logger.version == logger.experiment.id
    logger.finalize("failed")
    offline = Offline(tmp_path)
    assert offline.values("a-loss") == [(0, 0.5), (1, 0.25)]
    assert offline.values("a-n") == [(0, 3)]
    assert (offline.config["lr"], offline.config["layers"]) == (0.2, [1, 2])
    assert offline.artifacts == {"epoch-1-of-3.pt": ["epoch=1 of 3.pt"]}
    assert offline.exits == [1]


def test_two_wandb_loggers_of_a_process_keep_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    loggers = [WandbLogger(save_dir=tmp_path / name, offline=True, settings=QUIET) for name in "ab"]
    fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers)
    assert fabric.log("loss", torch.tensor(0.25), 3) == 0.25
    assert loggers[0].version != loggers[1].version
    for logger in loggers:
        logger.finalize("success")
    assert [Offline(tmp_path / name).values("loss") for name in "ab"] == [[(3, 0.25)]] * 2


def test_a_copy_of_a_wandb_logger_is_of_the_same_run(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, offline=True, settings=QUIET)
    logger.log_metrics({"loss": 1.0}, 0)
    copied = pickle.loads(pickle.dumps(logger))
    assert copied.version == logger.version
    logger.finalize("success")
    copied.log_metrics({"loss": 2.0}, 1)
    assert copied.experiment.id == logger.version
    copied.finalize("success")


LOGGERS = {
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": lambda place, **given: WandbLogger(save_dir=place, offline=True, settings=QUIET, **given),
    "mlflow": lambda place, **given: MLFlowLogger(save_dir=place, **given),
}


def losses(kind, logger, folders):
    """(step, loss) of the run that logged into these folders, as the logger's package reads them."""
    if kind == "csv":
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        return [(int(row["step"]), float(row["loss"])) for row in rows]
    if kind == "tensorboard":
        files = [EventAccumulator(str(file)).Reload() for file in Path(logger.log_dir).iterdir()]
        return sorted((e.step, e.value) for file in files for e in file.Scalars("loss"))
    if kind == "wandb":
        return [pair for folder in folders for pair in Offline(folder).values("loss")]
    return history(MlflowClient(f"sqlite:///{folders[-1]}/mlflow.db"), logger.version, "loss")


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_resumed_run_goes_on(tmp_path, kind):
    """Where it has loaded its logger; where it has only the id of the run, it counts from 0."""
    offline = kind == "wandb"  # a file per process, in a folder of its own: `wandb sync` joins them by the id
    folders = [tmp_path / (f"{n}" if offline else "all") for n in range(3)]
    versions = []
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        key = "run_id" if kind == "mlflow" else "version"
        logger = LOGGERS[kind](folder, **({key: versions[0]} if number == 2 else {}))
        fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
        state = {"logger": logger, "model": torch.nn.Linear(1, 1)}
        if number == 1:
            fabric.load(tmp_path / "last.pt", state)
        fabric.log("loss", 1.0)
        fabric.log("loss", 2.0)
        fabric.save(tmp_path / "last.pt", state)
        logger.finalize("success")
        versions.append(logger.version)
    assert len(set(versions)) == 1
    expected = [(0, 1.0), (1, 2.0), (2, 1.0), (3, 2.0), (0, 1.0), (1, 2.0)]
    assert sorted(losses(kind, logger, folders)) == sorted(expected)


def test_ranks_above_zero_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "_rank", 1)
    for logger in (WandbLogger(save_dir=tmp_path, offline=True), MLFlowLogger(save_dir=tmp_path)):
        logger.log_metrics({"loss": 1.0})
        logger.log_hyperparams({"lr": 0.1})
        logger.log_artifact(__file__)
        logger.experiment.anything("at all")
        logger.finalize("success")
        assert logger.version is None
    assert list(tmp_path.iterdir()) == []


# MLflow


@pytest.mark.parametrize("store", ["sqlite", "directory"])
def test_mlflow_keeps_what_it_is_given(tmp_path, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/own.db" if store == "sqlite" else (tmp_path / "store").as_uri()
    logger = MLFlowLogger("exp", "run", uri, {"team": "a"}, prefix="a")
    assert (logger.name, logger.version, logger.root_dir) == ("exp", None, None)
    logger.log_metrics({"loss": torch.tensor([0.5]), "n": 3})
    logger.log_metrics({"loss": 0.25})
    logger.log_metrics({"loss": 0.125}, step=9)
    with pytest.raises(ConfigurationError, match=r"'bad' is a str, which MLflow cannot chart\. Log a number"):
        logger.log_metrics({"bad": "high"})
    logger.log_hyperparams({"lr": 0.1, **{f"p{i}": i for i in range(150)}})
    with pytest.raises(mlflow.MlflowException, match="lr"):
        logger.log_hyperparams({"lr": 0.2})
    logger.finalize("failed")
    client, key = MlflowClient(uri), logger.version
    run = client.get_run(key)
    assert history(client, key, "a-loss") == [(0, 0.5), (1, 0.25), (9, 0.125)]
    assert run.data.metrics["a-n"] == 3
    assert len(run.data.params) == 151
    assert (run.info.status, run.data.tags["team"], run.info.run_name) == ("FAILED", "a", "run")


def test_a_run_of_mlflow_goes_on(tmp_path):
    first = MLFlowLogger(save_dir=tmp_path)
    first.log_metrics({"loss": 1.0}, 0)
    first.finalize("success")
    again = pickle.loads(pickle.dumps(MLFlowLogger(save_dir=tmp_path, run_id=first.version)))
    again.log_metrics({"loss": 0.5}, 1)
    assert again.experiment.get_run(first.version).info.status == "RUNNING"
    again.finalize("success")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert history(client, first.version, "loss") == [(0, 1.0), (1, 0.5)]
    assert client.get_run(first.version).info.status == "FINISHED"
    (experiment,) = [e for e in client.search_experiments() if e.name == "lightning_logs"]
    assert experiment.artifact_location == (tmp_path / "artifacts").as_uri()


def test_the_environment_names_the_server_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/env.db")
    logger = MLFlowLogger(save_dir=tmp_path / "unused")
    logger.log_metrics({"loss": 1.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.db"]
