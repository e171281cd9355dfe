"""Runs a training loop as rank zero of N ranks that do not exist, for two steps, and counts its memory.
Ranks of a pipeline do different work: there all N run on this machine.

Each case (a strategy, a precision, a batch size) runs in a fork of this process, with the real strategy; the
parent has run no backward pass before. Called by `plan.py`.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from array import array
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from fabric.core._torch import is_fsdp
from fabric.core.slices import use_slice
from fabric.core.source import is_user_code
from fabric.core.tree import flatten, map_tree
from fabric.data.loader import _FabricDataLoader
from fabric.fabric import Fabric
from fabric.launch.rank_exit import is_secondary_failure
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.precision.precision import Precision
from fabric.tools.plan import mirror
from fabric.tools.plan._torch import around_propagation, behave_as_accelerator
from fabric.tools.plan.fake import NO_VALUES, FakeTensors
from fabric.tools.plan.gloo import LIMIT, GlooGroup
from fabric.tools.plan.memory import FORWARD, MemoryTracker, Peak
from fabric.utilities.cloud_io import join_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 2
_CAUSE_S = 5  # seconds in which the rank that closed a connection of gloo reports its error
_LOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "fabric.strategies.ddp.strategy",
    "fabric.strategies.fsdp.strategy",
    "fabric.strategies.zero1.strategy",
)
"""Imported before the first fork: each case would import them again."""


_AFTER_DEVICE = (
    " A backward on a device ran in this process before, so that no fork of it can run one. "
    "Call fabric.plan(...) before the first use of a device, or write: fabric plan train.py"
)
_ADVICE = {
    "fork-based multiprocessing": _AFTER_DEVICE,
    "CUDA": ' The plan runs on the host. Write fabric.device and fabric.to_device(x) in place of "cuda".',
    "DataDependent": f" With --fake, {NO_VALUES}.",
}
"""Parts of error texts, and the advice for each."""


class Case(NamedTuple):
    """The settings of one simulated rank. None: as in the script."""

    ranks: int
    nodes: int = 1
    strategy: str | None = None
    precision: str | None = None
    batch_size: int | None = None
    scale: float = 1.0
    """Factor of the size of each batch."""
    fake: bool = False
    flops: bool = False
    rank: int = 0
    store: str = ""
    """The file of the store of all ranks of the case; "": only this rank exists."""


@dataclass
class CaseResult:
    """The needs of a case, or the error that ended it."""

    error: str = ""
    steps: int = 0
    curve: array[int] = field(default_factory=lambda: array("q"))
    peak: Peak = field(default_factory=lambda: Peak(0, {}, {}))
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that one rank sends in a step, by kind of collective."""
    flops: int = 0
    batch_size: int | None = None
    given: dict[str, str] = field(default_factory=dict)
    """The strategy and the precision in the script."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Classes of repeated modules, and how many there are."""
    optimizers: list[str] = field(default_factory=list)
    ranks: list[CaseResult] = field(default_factory=list)
    """The results of all ranks, where all were run."""


def simulate(case: Case, loop: Callable[[], Any]) -> CaseResult:
    """Return the needs of `loop`, run in a fork of this process for two steps."""
    return _result(*_fork(case, loop))


def simulate_all(case: Case, loop: Callable[[], Any]) -> CaseResult:
    """Return the needs of the rank with the highest peak. All ranks of the case run here, in forks; the first
    error ends them.
    """
    if case.fake:
        return CaseResult("Stages of a pipeline send each other values. Run the plan without --fake.")
    with tempfile.TemporaryDirectory() as folder:
        cases = [case._replace(rank=rank, store=f"{folder}/store") for rank in range(case.ranks * case.nodes)]
        children = [_fork(one, loop) for one in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            waiting = {pool.submit(_result, *child): child[0] for child in children}
            order, failed = [*waiting], list[CaseResult]()
            for future in as_completed(order):
                del waiting[future]
                if failed or not future.result().error:
                    continue
                failed.append(future.result())
                ended = set()
                if is_secondary_failure(failed[0].error):  # the rank that closed the connection fails, too
                    ended = wait(waiting, _CAUSE_S, FIRST_COMPLETED).done
                    failed += [one.result() for one in ended if one.result().error]
                for other in waiting.keys() - ended:
                    with suppress(ProcessLookupError):
                        os.kill(waiting[other], signal.SIGKILL)
    if failed:
        return next((one for one in failed if not is_secondary_failure(one.error)), failed[0])
    found = [future.result() for future in order]
    return replace(max(found, key=lambda one: one.peak.bytes), ranks=found)


def _fork(case: Case, loop: Callable[[], Any]) -> tuple[int, int]:
    """Run a case in a fork. Return its process and the pipe from which its result can be read."""
    for name in _LOADED:
        with suppress(ImportError):  # a strategy whose folder was deleted
            import_module(name)
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none of them
        child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            _discard_output()
            Run(case, writes).train(loop)
        finally:
            os._exit(1)
    os.close(writes)
    return child, reads


def _result(child: int, reads: int) -> CaseResult:
    with os.fdopen(reads, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer:
        found: CaseResult = pickle.loads(answer)  # of our own child
        return found
    return CaseResult(
        f"The script ended its process with exit code {code}. Let it run two steps of an optimizer."
    )


def _discard_output() -> None:
    """Discard output of the script, which would be printed once for each case."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")


class Run:
    """The state of one simulated rank, from its first line to its last step."""

    current: ClassVar[Run]

    def __init__(self, case: Case, pipe: int) -> None:
        self.case, self.found, self.pipe = case, CaseResult(), pipe
        self.fake = FakeTensors() if case.fake else None
        self.tracker = MemoryTracker(self.fake and self.fake.mode)
        self.tracker.counting = False
        self.begun = False
        self.steps: Counter[int] = Counter()
        self.ratio = case.scale
        self.roots: set[Any] = set()
        self.blocks: dict[Any, str] = {}
        self.flops = FlopCounterMode(display=False) if case.flops else None
        self.store: Any = dist.HashStore()
        self.before: dict[str, int] = {}
        """Bytes sent when the first step ended."""
        self.flops_before = 0
        self.saved: set[Path] = set()
        """Paths of the checkpoints that the script would have written."""
        Run.current = self

    def train(self, loop: Callable[[], Any]) -> None:
        """Run the loop, and report its needs or its error."""
        torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork
        kept = behave_as_accelerator()
        around_propagation(self.tracker.paused)
        self._join()
        if self.case.fake and (sharded := sys.modules.get("fabric.strategies.sharding.sharded")):
            vars(sharded)["check_first_forward"] = lambda root, gate: None  # it compares values
        for name in ("fabric", "fabric.fabric"):  # modules from which scripts import it
            vars(sys.modules[name])["Fabric"] = SimulatedFabric
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_ends)
        try:
            with self.tracker:
                loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.found.error = _described(error)
        del kept
        self.finish()

    def _join(self) -> None:
        case, group, size = self.case, mirror.MirrorGroup, self.case.ranks * self.case.nodes
        if case.store:
            self.store, group = dist.FileStore(case.store, size), GlooGroup
        else:  # other ranks have the digests of this rank's part of a file
            vars(import_module("fabric.checkpoint.digest"))["verify"] = lambda ranges, shares=None: None
        mirror.join(group, self.store, case.rank, case.ranks, case.nodes, case.fake)

    def finish(self) -> NoReturn:
        """Send the result to the parent, and end this process without cleanup."""
        self.tracker.counting = False
        found = self.found
        found.steps = max(self.steps.values(), default=0)
        if not found.error and found.steps < STEPS:
            made = "after one step" if found.steps else "without a step"
            found.error = (
                f"The script ended {made} of an optimizer. Call optimizer.step() in the loop, or give it "
                "arguments with which it makes two steps."
            )
        if not found.error:
            found.curve, found.peak = self.tracker.curve(), self.tracker.peak()
            found.traffic = dict(mirror.TRAFFIC - Counter(self.before))
            if self.flops is not None:
                found.flops = self.flops.get_total_flops() - self.flops_before
            found.blocks = dict(Counter(self.blocks.values()))
        with os.fdopen(self.pipe, "wb") as pipe:
            pickle.dump(found, pipe)
        if self.case.store and not found.error:  # other ranks may be waiting for the end of a message
            self.store.set(f"done {self.case.rank}", "")
            self.store.wait([f"done {rank}" for rank in range(self.case.ranks * self.case.nodes)], LIMIT)
        os._exit(0)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `Fabric` for this case, in place of the script's."""
        case, plugins = self.case, given.get("plugins") or []
        strategy = given.get("strategy", "auto")
        self.found.given["strategy"] = strategy if isinstance(strategy, str) else type(strategy).__name__
        listed = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        dropped = (ClusterEnvironment, Precision) if case.precision else (ClusterEnvironment,)
        if getattr(strategy, "cluster_environment", None) is not None:
            strategy.cluster_environment = None
        callbacks = given.get("callbacks") or []
        return {
            **given,
            "accelerator": "cpu",
            "devices": case.ranks,
            "num_nodes": case.nodes,
            "strategy": case.strategy or strategy,
            "precision": case.precision or given.get("precision"),
            "plugins": [one for one in listed if not isinstance(one, dropped)],
            "callbacks": [*(callbacks if isinstance(callbacks, list) else [callbacks]), self],
            "report": None,
        }

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Count allocations of the setup of a model."""
        self.count(True)
        try:
            yield
        finally:
            self.count(self.begun)

    def count(self, on: bool) -> None:
        """Start to count allocations, as of the device; with `on` False stop, since the host allocates."""
        if self.fake is not None and on != self.tracker.counting:
            if on:
                self.fake.mode.__enter__()
            else:
                self.fake.mode.__exit__(None, None, None)
        self.tracker.counting = on

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Count the tensors of a set-up model, and record its repeated modules."""
        plain = module.module
        self.roots.add(plain)
        for name in ("forward", "pipeline_step"):  # a pipeline calls blocks of a model, and not the model
            if (run := getattr(module, name, None)) is not None:
                module.__dict__[name] = partial(self._called, run)
        self.tracker.count_tensors([*plain.parameters(), *plain.buffers()], "parameters")
        classes = Counter(
            type(part)
            for parent in plain.modules()
            if isinstance(parent, torch.nn.ModuleList | torch.nn.Sequential)
            for part in parent.children()
            if next(part.children(), None) is not None
        )
        for part in plain.modules():
            if classes[type(part)] > 1:
                plain_class = type(part).__bases__[1] if is_fsdp(part) else type(part)
                self.blocks[part] = plain_class.__name__

    def deliver(self, batch: Any) -> Any:
        """Return a batch for the loop, with the number of rows of the case; ends the run after two steps."""
        self._look()
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        rows = len(tensors[0]) if tensors else 0
        if rows and self.found.batch_size is None:
            wanted = self.case.batch_size or rows
            self.ratio = max(1, round(wanted * self.case.scale)) / rows
            self.found.batch_size = round(rows * self.ratio)
        places = torch.arange(max(1, round(rows * self.ratio))) % max(rows, 1)
        batch = map_tree(lambda leaf: _on_device(leaf, rows, places), batch)
        if self.fake is not None:
            batch = map_tree(self.fake.of, batch)
        self._begin()
        self.tracker.count_tensors(flatten(batch)[0], "activations")
        return batch

    def _look(self) -> None:
        if self.steps and min(self.steps.values()) >= STEPS:
            self.finish()

    def _begin(self) -> None:
        self.count(True)
        if not self.begun:
            self.begun = True
            self.tracker.begin = max(0, len(self.tracker.deltas) - 1)
            if self.flops is not None:
                self.flops.__enter__()

    def _forward_begins(self, module: Any, _: Any) -> None:
        if module in self.roots:
            self._look()
            self._begin()
        elif module in self.blocks and self.tracker.phase() == FORWARD:
            self.tracker.block = self.blocks[module]

    def _forward_ends(self, module: Any, _: Any, output: Any) -> None:
        if module in self.blocks:
            self.tracker.end_block(output)

    def _called(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._look()
        self._begin()
        return run(*args, **kwargs)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self.steps[id(optimizer)] += 1
        if len(self.steps) == 1 and self.steps[id(optimizer)] == 1:
            self.before = dict(mirror.TRAFFIC)
            self.flops_before = 0 if self.flops is None else self.flops.get_total_flops()
            self.found.optimizers.append(type(optimizer).__name__)


def _on_device(leaf: Any, rows: int, places: torch.Tensor) -> Any:
    """Return a copy, as on a device, of the samples at `places`; other leaves of a batch unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf[places] if leaf.dim() and len(leaf) == rows else leaf.clone()


def _described(error: BaseException) -> str:
    """Return the error with the last line of the user's code, and advice."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    kind, text = type(error).__name__, str(error).strip().rstrip(".")
    advice = next((advice for part, advice in _ADVICE.items() if part in f"{kind} {text}"), "")
    return f"{kind}: {text}{place}.{advice}"


class SimulatedFabric(Fabric):
    """The user's `Fabric`, as rank zero of the ranks of a case."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**Run.current.arguments(given))
        Run.current.found.given["precision"] = self.strategy.precision.precision

    def save(self, path: Any, *args: Any, wait: bool = True, **kwargs: Any) -> Any:
        """Write nothing: the file would replace a checkpoint of the user's run."""
        Run.current.saved.add(Path(path).resolve())
        return None if wait else use_slice("background").PendingSave(self.strategy, path, None)

    def save_latest(self, directory: Any, state: Any, *, step: int, **kwargs: Any) -> Any:
        """Write nothing."""
        path = join_path(directory, f"step-{step:08d}")
        Run.current.saved.add(Path(path).resolve())
        return path

    def load(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load an existing checkpoint. One that this run would have written has the values of the state."""
        return {} if Path(path).resolve() in Run.current.saved else super().load(path, *args, **kwargs)

    def load_raw(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Load as `load` does."""
        if Path(path).resolve() not in Run.current.saved:
            super().load_raw(path, *args, **kwargs)

    def setup(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Set up a model, and count the allocations."""
        with Run.current.setting_up():
            if Run.current.fake is not None:
                Run.current.fake.convert(*args)
            return super().setup(*args, **kwargs)

    def setup_dataloaders(self, *dataloaders: Any, **kwargs: Any) -> Any:
        """Set up loaders that are not sharded over ranks: there may be too few samples for two steps."""
        made = super().setup_dataloaders(*dataloaders, **{**kwargs, "use_distributed_sampler": False})
        for loader in [made] if len(dataloaders) == 1 else made:
            loader.__class__ = _SimulatedLoader
        return made


class _SimulatedLoader(_FabricDataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        run = Run.current
        run.count(False)
        for batch in super().__iter__():
            yield run.deliver(batch)
            run.count(False)
        run.count(run.begun)
