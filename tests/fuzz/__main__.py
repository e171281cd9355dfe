"""`make fuzz`: random programs until the time is over. Failing ones are shrunk, printed and saved.

python tests/fuzz --minutes 10 --seed 0 [--layout fsdp[:ddp]] [--count 500] [--one SEED[:LAYOUT]]
python tests/fuzz --kind labels    (programs of one row of forms.py: of any; --one SEED too)
python tests/fuzz --without all    (which programs find each mend of mends.py that is undone)
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections import Counter
from pathlib import Path

from form_mends import FORM_MENDS
from grammar import generate, is_formed
from kinds import NAMES
from mends import MENDS as OTHER_MENDS
from program import Program
from refusals import brief, reason
from runner import CRASH, FOREIGN, HANG, INVALID, REFUSED, Outcome, Runner
from shrink import shrunk

MENDS = {**OTHER_MENDS, **FORM_MENDS}


def main() -> int:
    """0 if no program failed."""
    given = arguments()
    if given.without:
        names = list(MENDS) if given.without == "all" else [given.without]
        return sum([not found_without(name, given) for name in names])
    seeds = iter([int(given.one.split(":")[0])] if given.one else range(given.seed * 1_000_000, 10**12))
    layout = given.one.partition(":")[2] or None if given.one else given.layout
    tally, errors, failed = Counter(), Counter(), 0
    end, hangs = time.monotonic() + 60 * given.minutes, set()
    # Ctrl-C ends a long run early, with its summary.
    with Runner() as runner, contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end and sum(tally.values()) < given.count:
            seed = next(seeds, None)
            if seed is None:
                break
            program = generate(seed, layout, given.kind)
            if program.avoided or not re.search(given.only, program.text):
                continue
            outcome = runner.run(program)
            if outcome.failed or outcome.word == FOREIGN:
                outcome = runner.confirmed(program)
            if outcome.word == INVALID:
                continue
            tally[outcome.word] += 1
            if outcome.word in (REFUSED, FOREIGN):
                text = outcome.lines[0]
                why = reason(text) if outcome.word == REFUSED else None
                if outcome.word == REFUSED and why is None:  # owed, or wrong: see refusals.py
                    failed += 1
                    print(f"UNLISTED refusal: seed {seed}:{program.name}: {text[:200]}", flush=True)
                errors[why or "?  " + brief(text)] += 1
                if given.verbose or outcome.word == FOREIGN:
                    print(f"seed {seed}, {program.name}: {outcome.word}: {text[:200]}", flush=True)
            if outcome.failed and outcome.word == HANG and outcome.standing in hangs:
                failed += 1
                print(f"HANG: seed {seed}:{program.name}, where another did", flush=True)
            elif outcome.failed:
                failed += 1
                hangs.add(outcome.standing)
                report(program, outcome, runner, given, sum(tally.values()))
    print(summary(tally, errors))
    return 1 if failed else 0


def found_without(name: str, given: argparse.Namespace) -> bool:
    """Whether programs of the layouts that a mend is about fail when it is undone; says how many it took."""
    mend, begin, count = MENDS[name], time.monotonic(), 0
    layouts = mend.layouts or [None]
    with Runner(plant=mend.undone) as runner:
        for seed in range(given.seed * 1_000_000, 10**12):
            program = generate(seed, layouts[seed % len(layouts)], mend.kind)
            if program.avoided or not re.search(given.only, program.text):
                continue
            outcome = runner.run(program)
            count += outcome.word != INVALID
            minutes = (time.monotonic() - begin) / 60
            said = outcome.word in (REFUSED, FOREIGN) and mend.torch and mend.torch in outcome.lines[0]
            if outcome.failed or said:
                at = named(program, mend.kind, program.name)
                print(f"{name}: {outcome.word} in program {count}, {minutes:.1f} min ({at})", flush=True)
                return True
            if minutes > given.minutes:
                break
    print(f"{name}: NOT FOUND in {count} programs, {given.minutes:g} min", flush=True)
    return False


def named(program: Program, kind: str | None, layout: str | None) -> str:
    """The arguments that make the program again."""
    if kind is None and layout is None and is_formed(program.seed):
        return f"--one {program.seed} --kind any"
    return f"--one {program.seed}:{program.name}" + f" --kind {kind}" * (kind is not None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="another seed is another million of programs")
    parser.add_argument("--count", type=int, default=10**9, help="programs at most")
    parser.add_argument("--layout", help="one layout only, see layouts.py; fsdp:ddp: saved, then loaded")
    parser.add_argument("--kind", choices=("any", *NAMES), help="programs of these steps only, see forms.py")
    parser.add_argument("--only", default="", help="programs whose text has this pattern only")
    parser.add_argument("--one", help="one program, as its report names it: SEED or SEED:LAYOUT")
    parser.add_argument("--without", help="programs without one mend, or without each: all; see mends.py")
    parser.add_argument("--keep", default="fuzzed", help="where failing scripts go")
    parser.add_argument("--shrink", type=float, default=40.0, help="seconds for each failing program")
    parser.add_argument("--verbose", action="store_true", help="print every error")
    return parser.parse_args()


def report(
    program: Program, outcome: Outcome, runner: Runner, given: argparse.Namespace, number: int
) -> None:
    """Print and save the smallest program that fails alike."""

    def fails_alike(smaller: Program) -> bool:
        found = quick.run(smaller)
        return found.word == outcome.word and bool(found.owed) == bool(outcome.owed)

    quick = Runner(limit=8.0) if outcome.word in (HANG, CRASH) else runner
    try:
        small = shrunk(program, fails_alike, given.shrink)
        last = quick.run(small)
    finally:
        if quick is not runner:
            quick.pool.close()
    (keep := Path(given.keep)).mkdir(exist_ok=True)
    name = f"seed-{program.seed}-{program.name.replace(':', '-')}"
    ranks = " then ".join(f"{part.layout} on {part.world} ranks" for part in small.parts)
    title = f"{last.word} under {ranks}: {(last.lines or ('',))[0][:200]}"
    scripts = small.scripts(title.replace('"""', "'''").splitlines()[0], name)
    for file, text in scripts.items():
        (keep / file).write_text(text)
    at = named(program, given.kind, given.layout)
    print(f"\n{outcome.word}: program {number} ({at}), {ranks}, {keep}: {', '.join(scripts)}")
    print("\n".join(f"  {line[:300]}" for line in last.lines[:4]))
    print(*(f"  owed an error: {text}" for text in outcome.owed))
    print(*(part.body() for part in small.parts), sep="\n", flush=True)


def summary(tally: Counter, errors: Counter) -> str:
    """How programs ended, and the share of each error."""
    count = max(1, sum(tally.values()))
    lines = [f"{count} programs: " + ", ".join(f"{n} {word}" for word, n in tally.most_common())]
    lines += [f"  {100 * n / count:5.1f} %  {text}" for text, n in errors.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
