"""`python -m fabric.testing.recording script.py`: a rank of `fabric check`, which writes down its steps.

The script runs unchanged; `Fabric` in it is `RecordedFabric`, on the CPU, on as many ranks as the check says.
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

from fabric.checks import warn_of_raw
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
"""Variables: where records go, after how many steps the script ends, on how many ranks it runs; and, as JSON,
how many ranks share the data, and the samples in a batch of all of them, by loader.
"""
_STARTED = ("_spawn", "_fork", "_forkserver", "_notebook")


class Recorder:
    """A callback of `Fabric`: after each step, what this rank has seen and which gradients it holds."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.steps = int(os.environ[STEPS])
        self.models: list[Any] = []
        self.count = 0
        self.losses: list[float] = []
        self.rows: list[int] = []
        self.shared: set[str] = set()
        """Kinds of modules whose output for a sample depends on the others of its batch."""
        self.warned: list[str] = []
        """What says that ranks will compute something else than one process."""
        self.sizes: list[int | None] = []
        """Of each loader's batches on this rank, as the script wrote them."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """A model is set up: without dropout from here on, since ranks draw other numbers than one."""
        self.models.append(module)
        for part in module.modules():
            if isinstance(part, Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0
            if isinstance(part, BatchNorm):
                self.shared.add(type(part).__name__)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """One more step: write it down, and end with the last."""
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
        warn_of_raw(share["num_replicas"], model=False)  # a plain loss.backward() looks for none
        record |= {"warned": self.warned, "sizes": self.sizes, "shared": sorted(self.shared), **share}
        rank = strategy.global_rank if strategy.world_size > 1 else 0
        torch.save(record, self.folder / f"step{self.count}-rank{rank}.pt")
        self.losses, self.rows = [], []
        if self.count == self.steps:
            strategy.barrier("fabric check")
            sys.stdout.flush()
            os._exit(0)


class RecordedFabric(Fabric):
    """The user's `Fabric`, on the CPU and on as many ranks as the check says."""

    def __init__(self, **given: Any) -> None:
        ranks, strategy = int(os.environ[RANKS]), given.get("strategy", "auto")
        if ranks == 1:
            own = strategy.arguments["precision"] if isinstance(strategy, Strategy) else None
            given |= {"strategy": "auto", "precision": given.get("precision") or own}
        elif isinstance(strategy, str):
            given["strategy"] = next(
                (strategy.removesuffix(e) for e in _STARTED if strategy.endswith(e)), strategy
            )
        callbacks = given.get("callbacks") or []
        listed = callbacks if isinstance(callbacks, list) else [callbacks]
        if isinstance(given.get("precision"), str | int) and "16" in str(given["precision"]):
            given["precision"] = "32-true"  # in which differences are crisp
        given |= {"accelerator": "cpu", "devices": ranks, "num_nodes": 1, "callbacks": [*listed, RECORDER]}
        super().__init__(**given)

    def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass and record the loss."""
        super().backward(tensor, *args, **kwargs)
        if tensor.numel() == 1:
            RECORDER.losses.append(float(tensor.detach()))

    def setup_dataloaders(self, *dataloaders: Any, **kwargs: Any) -> Any:
        """Set up loaders that record; on one rank a loader joins the batches of all ranks."""
        world, sizes = json.loads(os.environ[BATCHES])
        wanted = [*sizes[len(RECORDER.sizes) :], *[None] * len(dataloaders)]
        RECORDER.sizes += [getattr(loader, "batch_size", None) for loader in dataloaders]
        given = [joined(loader, world, size) for loader, size in zip(dataloaders, wanted, strict=False)]
        made = super().setup_dataloaders(*given, **kwargs)
        for loader in [made] if len(dataloaders) == 1 else made:
            loader.__class__ = _RecordedLoader
        return made


class _RecordedLoader(_FabricDataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            RECORDER.rows += digests(batch)
            yield batch


class Joined:
    """Batches of a sampler of the user's own, so many of them as one."""

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


def joined(loader: Any, times: int, size: int | None) -> Any:
    """A copy of the loader with batches of this size; of a user's own batch sampler, so many in one."""
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
        made.__dict__["batch_sampler"] = Joined(batches, times)
    return made


def digests(batch: Any) -> list[int]:
    """A number for each sample of a batch, by its tensors; of a batch without tensors, none."""
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = min([len(tensor) for tensor in tensors], default=0)
    sums = [0] * rows
    for tensor in tensors:
        if len(tensor) == rows:
            for i, row in enumerate(tensor.detach().cpu()):
                sums[i] = crc32(bytes(as_bytes(row).tolist()), sums[i])
    return sums


def _note_warnings() -> None:
    plain: Any = warnings.warn

    def warn(message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
        if isinstance(category, type) and issubclass(category, RanksDifferWarning):
            RECORDER.warned.append(str(message))  # also where the script ignores warnings
        plain(message, category, stacklevel + 1, **more)

    vars(warnings)["warn"] = warn


def main() -> None:
    """Run the script that the command line names, as `python script.py` or `python -m module` would."""
    for name in ("fabric", "fabric.fabric"):  # where scripts take it from
        vars(sys.modules[name])["Fabric"] = RecordedFabric
    _note_warnings()
    seed = _rank()  # draws of a script that seeds nothing differ between ranks, as without the check
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
