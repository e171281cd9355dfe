"""Runs a program in plain torch and on ranks, and says how it ends."""

from __future__ import annotations

import gc
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import idioms
import models
import oracle
import torch
from program import DIFFER, HEADER, ORDER, UNEQUAL_CALLS, WARNED, Program

import fabric
from fabric.core.errors import FabricError
from fabric.guard import call_checker as control
from fabric.testing import RankFailure, RankPool, RankTimeout
from fabric.utilities.warnings import RanksDifferWarning
from fabric.watchdog import watchdog

EQUAL, REFUSED, FOREIGN, DIFFERENT, HANG, CRASH, BUG, INVALID, ALARM, SAID = (
    "equal", "refused", "torch's error", "DIFFERENT", "HANG", "CRASH", "BUG", "invalid", "FALSE ALARM",
    "warned",
)  # fmt: skip
FAILURES = (DIFFERENT, HANG, CRASH, BUG, ALARM)
OWED = "|".join(
    [
        "The loss of (a|the first) backward",
        "A gradient passed through",
        "The last batch of",
    ]
)
"""Warnings of numbers that differ: of `forms.py`, whose numbers else are those of one process."""
LIMIT = 12.0  # seconds that a program of milliseconds may take
SETTLE = 0.7  # seconds after an error in which the other ranks may come to theirs
WARM_UP = 120.0  # seconds in which processes start, before the first program's time begins
PRELOAD = [  # what the first program would import within its time
    "torchmetrics",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "fabric.strategies.fsdp.strategy",
    "fabric.strategies.pipeline.strategy",
    "fabric.strategies.zero1.strategy",
    "fabric.strategies.tensor_parallel.strategy",
]


@dataclass(frozen=True)
class Outcome:
    """How a program ended: a word, and one line for each difference, error or stack."""

    word: str
    lines: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()
    """What the oracle knows to be wrong in the program: such a program must be refused."""
    text: str = field(default="", compare=False)

    @property
    def failed(self) -> bool:
        return self.word in FAILURES

    @property
    def standing(self) -> tuple[str, ...]:
        """Of a hang: the lines of the package where ranks stand, like for hangs that are alike."""
        return tuple(sorted(set(re.findall(r'File "[^"]*/(fabric/[^"]*", line \d+)', self.text))))


def namespace(program: Program) -> dict[str, Any]:
    """What the program's text may name, and the functions of that text."""
    names: dict[str, Any] = {}
    imports = HEADER[HEADER.index("import contextlib") :]
    exec(compile(imports, "imports", "exec"), names)
    names.update(
        {
            k: v
            for module in (oracle, models, idioms)
            for k, v in vars(module).items()
            if not k.startswith("__")
        }
    )
    exec(compile(program.main(), "the_loop.py", "exec"), names)
    return names


def as_plain(program: Program, folder: Path) -> tuple[Any, ...]:
    """What `run_plain` takes."""
    return namespace(program)["program"], folder, program.ranks, program.precision, program.replicas


def on_rank(program: Program, folder: str, plant: str | None = None) -> None:
    """The program on this rank; what it saw goes to a file, so that it is known whatever others do."""
    import torch.distributed as dist

    rank = dist.get_rank()
    gc.collect()  # what is left of the program before this one
    # Standstills are a tenth of all programs: proved with less patience.
    watchdog._PERIOD_S, watchdog._BLOCKED_S, control.PATIENCE = 0.1, 0.3, 0.2
    checker = control.CallChecker  # a program in a tree sets these, for itself
    checker.fan_out, checker.gather_up_to = control.FAN_OUT, control.GATHER_UP_TO
    names = namespace(program)
    if plant is not None:
        exec(plant, names)
    report: dict[str, Any] = {"error": None, "kind": None, "warnings": []}
    path = Path(folder, f"report-{rank}")
    sys.excepthook = partial(told, path, report)  # a watchdog ends a rank that stands still for ever by it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RanksDifferWarning)
            warnings.showwarning = lambda message, *_: report["warnings"].append(str(message))
            report["notes"] = oracle.run_on_rank(
                names["program"], names["make_fabric"], Path(folder), program.precision
            )
    except Exception as error:
        report["notes"] = getattr(error, "notes", [])
        told(path, report, type(error), error, error.__traceback__)
    else:
        write(path, report)
    finally:
        sys.excepthook = sys.__excepthook__
    if report["error"] and not all_there(Path(folder), dist.get_world_size()):
        raise RuntimeError("This rank's end wakes those that wait for it, as it would in a job.")


def told(path: Path, report: dict[str, Any], kind: type, error: BaseException, trace: Any) -> None:
    """Report an error that ends this rank."""
    text = "".join(traceback.format_exception(kind, error, trace))
    report |= {"error": described(error), "kind": kind_of(error), "text": text}
    write(path, {"notes": []} | report)


def write(path: Path, report: dict[str, Any]) -> None:
    """As a whole, or not at all."""
    path.with_suffix(".part").write_bytes(pickle.dumps(report | {"when": time.monotonic()}))
    path.with_suffix(".part").rename(path)


def all_there(folder: Path, count: int) -> bool:
    """Whether all ranks report within some seconds after the first error."""
    end = time.monotonic() + SETTLE
    while time.monotonic() < end:
        if all((folder / f"report-{rank}").exists() for rank in range(count)):
            return True
        time.sleep(0.01)
    return False


def nothing() -> None:
    """What new processes do first."""


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def kind_of(error: BaseException) -> str:
    """Who raised an error: "ours" on purpose, "bug" by a fault of the package, "other" is torch."""
    if isinstance(error, FabricError):
        return "ours"
    lines = [*traceback.walk_tb(error.__traceback__)]
    where = lines[-1][0].f_code.co_filename if lines else ""
    return "bug" if Path(fabric.__file__).parent in Path(where).parents else "other"


class Runner:
    """A warm pool, and the outcomes of programs on it."""

    def __init__(self, plant: str | None = None, limit: float = LIMIT) -> None:
        self.pool = RankPool(world_size=4, timeout=limit, preload=PRELOAD)
        self.plant = plant

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def run(self, program: Program, patience: float = 1.0) -> Outcome:
        """How the program ends; `patience` times the limit is a hang."""
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            for name in ("plain", "ranks", "rounded"):
                (folder / name).mkdir()
            wanted, owed = [], ()
            for part in program.parts:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        want, plain = oracle.run_plain(*as_plain(part, folder / "plain"))
                except Exception as error:
                    return Outcome(INVALID, (described(error),), text=traceback.format_exc())
                if oracle.explodes(want, part.precision):
                    return Outcome(INVALID, ("numbers explode",))
                wanted.append(want)
                owed = tuple(dict.fromkeys((*owed, *plain.owed)))
            for part, want in zip(program.parts, wanted, strict=True):
                outcome = named(part, self._on_ranks(part, folder / "ranks", want, owed, patience))
                if outcome.word != EQUAL:
                    break
            if outcome.word == DIFFERENT and not owed:
                for part, want in zip(program.parts, wanted, strict=True):
                    if oracle.rounding_decides(want, *as_plain(part, folder / "rounded")):
                        return Outcome(INVALID, ("rounding decides",))
            return outcome
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def confirmed(self, program: Program) -> Outcome:
        """How it ends in fresh processes, where no other program ran before."""
        self.fresh()
        return self.run(program, patience=3.0)

    def fresh(self) -> None:
        """Other processes for the next program."""
        self.pool._stop()

    def _on_ranks(
        self, program: Program, folder: Path, want: list, owed: tuple[str, ...], patience: float
    ) -> Outcome:
        broken: BaseException | None = None
        for path in folder.glob("report-*"):  # of the part before
            path.unlink()
        if len(self.pool.pids) < program.world:
            self.pool.run(nothing, world_size=program.world, timeout=WARM_UP)
        try:
            limit = self.pool.timeout * patience
            with mock.patch.dict(
                os.environ, {"FABRIC_HANG_REPORT_AFTER": "600"}
            ):  # the watchdog runs, and is silent
                self.pool.run(
                    on_rank, program, str(folder), self.plant, world_size=program.world, timeout=limit
                )
        except RankFailure as error:
            broken = error
        reports = [read(folder / f"report-{rank}") for rank in range(program.world)]
        return judged(program, reports, broken, want, owed)


def judged(program: Program, reports: list, broken: BaseException | None, want: list, owed: tuple) -> Outcome:
    """The outcome, from what ranks have reported and what the pool has seen."""
    there = [report for report in reports if report is not None]
    errors = [
        f"rank {r}: {report['error']}" for r, report in enumerate(reports) if report and report["error"]
    ]
    text = "\n".join(report.get("text", "") for report in there)
    ended = any(
        "CollectiveMismatch" in error for error in errors
    )  # then the watchdog ends ranks that cannot raise
    if len(there) < len(reports) and not isinstance(broken, RankTimeout) and not ended:
        return Outcome(CRASH, (first_line(broken),), owed, f"{broken}\n{text}")
    if errors:
        first = min((r for r in there if r["error"]), key=lambda report: report["when"])
        alone = (
            [] if len(errors) == len(reports) else [f"(an error on {len(errors)} of {len(reports)} ranks)"]
        )
        word = {"ours": REFUSED, "bug": BUG}.get(first["kind"], FOREIGN)
        differs = DIFFER in program.body() or UNEQUAL_CALLS in program.body()
        # Where the loop replaced averaged gradients by its own, only the values after the step show it.
        differs = differs or any("never synchronised" in one for one in owed)
        if "ReplicasDivergedError" in first["error"] and not differs:
            word = ALARM
        if first["error"].startswith("NeverCompared"):
            word = DIFFERENT
        at = next(rank for rank, report in enumerate(reports) if report is first)
        return Outcome(word, (f"rank {at}: {first['error']}", *alone), owed, text)
    if len(there) < len(reports):
        return Outcome(HANG, (first_line(broken),), owed, f"{broken}\n{text}")
    found = oracle.differences(
        want, [report["notes"] for report in there[program.place.idle :]], program.precision
    )
    said = [line for report in there for line in report["warnings"] if re.search(OWED, line)]
    warned = said and WARNED in program.body()
    if found:
        return Outcome(SAID if warned else DIFFERENT, (*said, *found), owed)
    if said and warned:  # what differs was smaller than the tolerance
        return Outcome(SAID, (*said,), owed)
    if said:
        return Outcome(ALARM, ("ranks are equal, and there was a warning", *said), owed)
    if broken is not None:
        return Outcome(CRASH, (first_line(broken),), owed, str(broken))
    return Outcome(EQUAL, (), owed)


def named(program: Program, outcome: Outcome) -> Outcome:
    """The outcome, which differs if ranks used two models in another order, and no error says so."""
    about_ranks = any(name in outcome.text for name in ("CollectiveMismatch", "ReplicasDiverged"))
    if (
        ORDER not in program.body()
        or program.ranks == 1
        or program.body().count(DIFFER) > 1  # and the error is of what was different before
        or "models and optimizers in one order" in outcome.text
    ):
        return outcome
    if outcome.word == EQUAL or (outcome.word == REFUSED and about_ranks):
        return replace(outcome, word=DIFFERENT, lines=("another order was not named", *outcome.lines))
    return outcome


def read(path: Path) -> dict[str, Any] | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error is not None and str(error).strip() else repr(error)


torch.set_num_threads(1)
