"""`python -m fabric.testing.recording script.py`: a rank of `fabric check`, which records its steps in files.

The script runs unchanged; `Fabric` in it is `RecordedFabric`, on the CPU, with the number of ranks of RANKS.
"""

from __future__ import annotations

import copy
import json
import os
import random
import runpy
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DataLoader

from fabric.checks import warn_if_not_set_up
from fabric.core._torch import BatchNorm
from fabric.core.errors import FabricError
from fabric.core.tree import flatten
from fabric.data.loader import _FabricDataLoader
from fabric.fabric import Fabric
from fabric.precision.dtypes import as_bytes
from fabric.strategies.strategy import Strategy
from fabric.testing._torch import Dropout
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, STEPS, RANKS, BATCHES = [f"FABRIC_CHECK_{name}" for name in ("FOLDER", "STEPS", "RANKS", "BATCHES")]
"""Environment variables: the folder of the records; the number of steps after which the script ends; the
number of ranks; and, as JSON, the number of data shards, and for each loader the size of the global batch.
"""
_LAUNCHER_SUFFIXES = ("_spawn", "_fork", "_forkserver", "_notebook")


class Recorder:
    """Callback of `Fabric` that records samples, losses and gradients of this rank after each step."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.steps = int(os.environ[STEPS])
        self.models: list[Any] = []
        self.count = 0
        self.losses: list[float] = []
        self.rows: list[int] = []
        self.shared: set[str] = set()
        """Classes of modules whose output for a sample depends on other samples of the batch."""
        self.warned: list[str] = []
        """Warnings that several ranks compute other results than one process."""
        self.sizes: list[int | None] = []
        """Batch size of each loader on this rank, as in the script."""
        self.saved: set[Path] = set()
        """Paths of the checkpoints of this run."""

    def path_of(self, path: Any) -> Any:
        """Return the path of the checkpoint that this run wrote as `path`; `path` if there is none."""
        scratch = _scratch(path)
        return scratch if scratch in self.saved else path

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Turn dropout of a new model off: several ranks draw other random numbers than one."""
        self.models.append(module)
        for part in module.modules():
            if isinstance(part, Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0
            if isinstance(part, BatchNorm):
                self.shared.add(type(part).__name__)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Write a record of this step, and end the process after the last one."""
        self.count += 1
        grads = {}
        for number, model in enumerate(self.models):
            prefix = f"model {number}: " if len(self.models) > 1 else ""
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                if grad is not None:
                    grads[prefix + name] = (
                        grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                    ).clone()
        record: dict[str, Any] = {"grads": grads, "losses": self.losses, "rows": self.rows}
        share = strategy.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        warn_if_not_set_up(share["num_replicas"], no_model=False)  # a plain loss.backward() does not check
        record |= {"warned": self.warned, "sizes": self.sizes, "shared": sorted(self.shared), **share}
        rank = strategy.global_rank if strategy.world_size > 1 else 0
        torch.save(record, self.folder / f"step{self.count}-rank{rank}.pt")
        self.losses, self.rows = [], []
        if self.count == self.steps:
            strategy.barrier("fabric check")
            sys.stdout.flush()
            os._exit(0)


class RecordedFabric(Fabric):
    """The user's `Fabric`, on the CPU and on RANKS ranks."""

    def __init__(self, **kwargs: Any) -> None:
        ranks, strategy = int(os.environ[RANKS]), kwargs.get("strategy", "auto")
        if ranks == 1:
            of_strategy = strategy.arguments["precision"] if isinstance(strategy, Strategy) else None
            kwargs |= {"strategy": "auto", "precision": kwargs.get("precision") or of_strategy}
        elif isinstance(strategy, str):
            kwargs["strategy"] = next(
                (strategy.removesuffix(e) for e in _LAUNCHER_SUFFIXES if strategy.endswith(e)), strategy
            )
        callbacks = kwargs.get("callbacks") or []
        listed = callbacks if isinstance(callbacks, list) else [callbacks]
        if isinstance(kwargs.get("precision"), str | int) and "16" in str(kwargs["precision"]):
            kwargs["precision"] = "32-true"  # rounding of half precision would hide differences
        kwargs |= {"accelerator": "cpu", "devices": ranks, "num_nodes": 1, "callbacks": [*listed, RECORDER]}
        kwargs["report"] = None  # the directory is that of the user's runs
        super().__init__(**kwargs)

    def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass and record the loss."""
        super().backward(tensor, *args, **kwargs)
        if tensor.numel() == 1:
            RECORDER.losses.append(float(tensor.detach()))

    def save(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Save into a folder that is removed after the check."""
        RECORDER.saved.add(_scratch(path))
        return super().save(_scratch(path), *args, **kwargs)

    def save_latest(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save into a folder that is removed after the check."""
        RECORDER.saved.add(_scratch(directory))
        return super().save_latest(_scratch(directory), *args, **kwargs)

    def load(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the checkpoint of this run for the path, else the existing file."""
        return super().load(RECORDER.path_of(path), *args, **kwargs)

    def load_raw(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Load the checkpoint of this run for the path, else the existing file."""
        super().load_raw(RECORDER.path_of(path), *args, **kwargs)

    def load_latest(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the checkpoint of this run in the directory, else the existing one."""
        return super().load_latest(RECORDER.path_of(directory), *args, **kwargs)

    def setup_dataloaders(self, *dataloaders: Any, **kwargs: Any) -> Any:
        """Set up loaders that record their samples; on one rank a loader yields the batches of all ranks."""
        world, recorded = json.loads(os.environ[BATCHES])
        sizes = [*recorded[len(RECORDER.sizes) :], *[None] * len(dataloaders)]
        RECORDER.sizes += [getattr(loader, "batch_size", None) for loader in dataloaders]
        joined = [join_batches(loader, world, size) for loader, size in zip(dataloaders, sizes, strict=False)]
        wrapped = super().setup_dataloaders(*joined, **kwargs)
        for loader in [wrapped] if len(dataloaders) == 1 else wrapped:
            loader.__class__ = _RecordedLoader
        return wrapped


def _scratch(path: Any) -> Path:
    """Return the path at which a checkpoint is written in place of `path`."""
    name = str(path) if "://" in str(path) else str(Path(path).absolute())
    return RECORDER.folder / "saved" / f"{crc32(name.encode()):08x}" / Path(name).name


class _RecordedLoader(_FabricDataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            RECORDER.rows += digests(batch)
            yield batch


class JoinedBatchSampler:
    """Concatenates `times` batches of the user's batch sampler to one."""

    def __init__(self, batches: Any, times: int) -> None:
        self.batches, self.times = batches, times

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self.batches)
        while block := list(islice(source, self.times)):
            yield [index for batch in block for index in batch]

    def __len__(self) -> int:
        return (len(self.batches) + self.times - 1) // self.times

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


def join_batches(loader: Any, times: int, size: int | None) -> Any:
    """Return a copy of the loader whose batches have this size, or `times` batches of a user's sampler."""
    if times == 1 or not isinstance(loader, DataLoader):
        return loader
    made, batches = copy.copy(loader), loader.batch_sampler
    if loader.batch_size is not None:
        size = size or loader.batch_size * times  # a script may divide a batch by the ranks itself
        made.__dict__["batch_size"] = size
    if type(batches) is BatchSampler:
        size = size or batches.batch_size * times
        made.__dict__["batch_sampler"] = BatchSampler(batches.sampler, size, batches.drop_last)
    elif batches is not None:
        made.__dict__["batch_sampler"] = JoinedBatchSampler(batches, times)
    return made


def digests(batch: Any) -> list[int]:
    """Return a hash of the tensors of each sample of a batch; [] for a batch without tensors."""
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = min([len(tensor) for tensor in tensors], default=0)
    sums = [0] * rows
    for tensor in tensors:
        if len(tensor) == rows:
            for i, row in enumerate(tensor.detach().cpu()):
                sums[i] = crc32(bytes(as_bytes(row).tolist()), sums[i])
    return sums


def _record_warnings() -> None:
    original: Any = warnings.warn

    def warn(message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
        if isinstance(category, type) and issubclass(category, RanksDifferWarning):
            RECORDER.warned.append(str(message))  # also if the script ignores warnings
        original(message, category, stacklevel + 1, **more)

    vars(warnings)["warn"] = warn


def main() -> None:
    """Run the script of the command line, as `python script.py` or `python -m module` would."""
    for name in ("fabric", "fabric.fabric"):  # modules from which scripts import it
        vars(sys.modules[name])["Fabric"] = RecordedFabric
    _record_warnings()
    seed = _rank()  # without a seed in the script, random numbers differ between ranks, as without the check
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    sys.argv = sys.argv[1:]
    try:
        _run_script()
    except FabricError as error:
        text = f"{type(error).__name__}: {error}"
        (RECORDER.folder / f"failed-rank{_rank()}").write_text(text)
        raise


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _run_script() -> None:
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    RECORDER = Recorder()
    main()
