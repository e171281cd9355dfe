"""Findings: results of checks, graded by limits.ini, merged over ranks, printed. Imports no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError
from fabric.core.messages import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OK, WARN, FAIL = "OK", "WARN", "FAIL"
GROUPS = ("software", "machine", "network", "ranks", "baseline")
FORMAT = "fabric doctor 1"


class Reading(NamedTuple):
    """The result of a check: its section of limits.ini, a number (larger is better), a text."""

    name: str
    value: float
    text: str


class Finding(NamedTuple):
    """A graded result, as `--json` prints it."""

    group: str
    name: str
    status: str
    text: str
    fix: str


@cache
def limits() -> ConfigParser:
    """Return limits.ini."""
    parser = ConfigParser(interpolation=None)
    parser.read_string(Path(__file__).with_name("limits.ini").read_text(encoding="utf-8"))
    return parser


def grade(row: Reading, name: str = "") -> Finding:
    """Return the finding of a result; `name` replaces the name in its limits."""
    limit = limits()[row.name]
    status = FAIL if row.value < float(limit["fail"]) else WARN if row.value < float(limit["warn"]) else OK
    return Finding(limit["group"], name or row.name, status, row.text, "" if status == OK else limit["fix"])


def merge(by_rank: Mapping[int, Iterable[Reading]], nodes: Mapping[int, str]) -> list[Finding]:
    """Return a finding for each check: the worst rank's, with the names of all ranks that are not OK."""
    checks: dict[str, dict[int, Reading]] = defaultdict(dict)
    for rank, rows in by_rank.items():
        for row in rows:
            checks[row.name][rank] = row
    found = []
    for each in checks.values():
        worst = min(each, key=lambda rank: each[rank].value)
        finding, bad = grade(each[worst]), [rank for rank, row in each.items() if grade(row).status != OK]
        differ = len({row.text for row in each.values()}) > 1
        who = f": {format_ranks(bad, nodes)}" if bad else f" ({format_ranks([worst], nodes)} has the least)"
        found.append(
            finding._replace(text=finding.text + (who if differ or (bad and len(by_rank) > 1) else ""))
        )
    return found


def format_ranks(ranks: Iterable[int], nodes: Mapping[int, str]) -> str:
    """Return ranks as text, with their machines if there are several: "ranks 0-3, 8 on node 0 (a1)"."""
    ordered = sorted(set(ranks))
    names = list(dict.fromkeys([nodes[rank] for rank in ordered if rank in nodes]))
    where = f" on {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
    return f"{name_ranks(ordered)}{where}"


def counted(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def compare_ranks(name: str, by_rank: Mapping[int, Mapping[str, str]], nodes: Mapping[int, str]) -> Reading:
    """Return the check that names have the same values on all ranks, with the differences and their ranks."""
    same, differ = [], []
    for key in sorted({key for each in by_rank.values() for key in each}):
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, each in by_rank.items():
            groups[each.get(key, "none")].append(rank)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        same.append(f"{key} {ordered[0][0]}")
        if len(groups) > 1:
            differ.append(f"{key}: " + "; ".join([f"{v} on {format_ranks(r, nodes)}" for v, r in ordered]))
    return Reading(name, float(not differ), ". ".join(differ) or ", ".join(same) or "none set")


def format_table(title: str, findings: list[Finding]) -> str:
    """Return the table that rank zero prints."""
    lines, width = [title], max([len(each.name) for each in findings], default=0) + 2
    for group in GROUPS:
        found = [each for each in findings if each.group == group]
        lines += [group] if found else []
        for each in found:
            lines.append(f"  {each.status:<5} {each.name:<{width}}{each.text}")
            lines += [f"{'':{width + 8}}-> {each.fix}"] if each.fix else []
    count = {status: sum([each.status == status for each in findings]) for status in (FAIL, WARN)}
    rest = ": see the lines with ->" if any(count.values()) else ""
    return "\n".join([*lines, f"{count[FAIL]} FAIL, {count[WARN]} WARN{rest}"])


def read_baseline(path: str) -> dict[str, Any]:
    """Return the report that `--json` has written.

    Raises:
        ConfigurationError: There is no such file, or it is no such report.
    """
    advice = "Write one on a healthy day: fabric doctor --json > healthy.json."
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--baseline {path} cannot be read ({error.strerror}). {advice}") from None
    except ValueError:
        raise ConfigurationError(f"--baseline {path} is no JSON, or was cut short. {advice}") from None
    given = found.get("format") if isinstance(found, dict) else type(found).__name__
    if given != FORMAT:
        raise ConfigurationError(f"--baseline {path} has the format {given!r}, and not {FORMAT!r}. {advice}")
    return dict(found)


def compare_days(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Finding]:
    """Return findings for figures worse than in the baseline, and for versions that differ from it."""
    names, day = {*then["versions"], *now["versions"]}, then["date"]
    pairs = {name: (then["versions"].get(name, "none"), now["versions"].get(name, "none")) for name in names}
    changed = [
        f"{name} {old} on {day}, {new} now" for name, (old, new) in sorted(pairs.items()) if old != new
    ]
    found = [grade(Reading("baseline, versions", float(not changed), "; ".join(changed) or f"as on {day}"))]
    sizes = [
        f"{counted(each['ranks'], 'rank')} on {counted(each['nodes'], 'machine')}" for each in (then, now)
    ]
    if sizes[0] != sizes[1]:
        return [*found, grade(Reading("baseline, size", 0, f"{sizes[0]} on {day}, {sizes[1]} now"))]
    for name in sorted(now["figures"].keys() & then["figures"].keys()):
        old, new = then["figures"][name], now["figures"][name]
        ratio = new / max(old, 1e-9) if name.endswith("/s") else old / max(new, 1e-9)
        found.append(grade(Reading("baseline", ratio, f"{old:.4g} on {day}, {new:.4g} now"), name))
    return found
