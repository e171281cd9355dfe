"""Takes statements out of a failing program for as long as it still fails alike."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from program import Node, Program


def shrunk(program: Program, still_fails: Callable[[Program], bool], seconds: float = 120.0) -> Program:
    """The smallest program found: no line of it can go, or the time is over."""
    end = time.monotonic() + seconds
    progress, tried = True, set()
    while progress:
        progress = False
        for smaller in candidates(program):
            if time.monotonic() > end:
                return program
            if smaller in tried:
                continue
            tried.add(smaller)
            pairs = zip(smaller.parts, program.parts, strict=False)
            if all(keeps_setups(*pair) for pair in pairs) and still_fails(smaller):
                program, progress = smaller, True
                break
    return program


def keeps_setups(smaller: Program, program: Program) -> bool:
    """Whether what was set up still is where it is used: forgetting that is a fault of its own."""
    before, after = program.body(), smaller.body()
    for name in re.findall(r"(\w+)", " ".join(re.findall(r"([\w, ]+) = fabric\.setup", before))):
        used = re.search(rf"\b{name}\b(?! = )(?!, \w+ = )", after)
        if used and not re.search(rf"\b{name}\b[\w, ]* = fabric\.setup", after):
            return False
    return True


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, the smallest first; of two parts first without the second."""
    if program.then:
        yield replace(program, then=None)
        yield from in_both(program)
        for smaller in candidates(program.then):
            yield replace(program, then=smaller)
    if program.world > min(program.place.worlds):
        yield replace(program, world=min(program.place.worlds))
    lines = program.lines
    for size in (len(lines) // 2, len(lines) // 4):  # whole runs of lines first
        for at in range(0, len(lines) - size + 1, size) if size > 1 else ():
            yield program.with_lines(lines[:at] + lines[at + size :])
    for smaller in sorted(without_one(lines), key=weight):
        yield program.with_lines(smaller)


def in_both(program: Program) -> Iterator[Program]:
    """A line that is in both parts goes, or gets simpler, in both."""
    then = program.then
    for line in dict.fromkeys(node for node in program.lines if node in then.lines):
        for shorter in [(), *((text,) for text in (simpler_lines(line) if isinstance(line, str) else ()))]:
            parts = [
                tuple(new for node in part.lines for new in (shorter if node == line else (node,)))
                for part in (program, then)
            ]
            yield replace(program, lines=parts[0], then=then.with_lines(parts[1]))


def weight(lines: tuple[Node, ...]) -> int:
    return sum(1 if isinstance(node, str) else 1 + weight(node[1]) for node in lines)


def without_one(lines: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """Every way to leave out one line or block, to let a block's lines stand without it, or to loop less."""
    for at, node in enumerate(lines):
        before, after = lines[:at], lines[at + 1 :]
        yield before + after
        if isinstance(node, str):
            for simpler in simpler_lines(node):
                yield (*before, simpler, *after)
            continue
        head, below = node
        if head.startswith("#"):
            continue
        if not head:  # lines that stay together: the first one's block may stand alone
            first = below[0]
            yield before + (first[1] if isinstance(first, tuple) else (first,)) + after
        elif not head.startswith(("def ", "try", "except")):
            yield before + below + after
        for count in fewer(head):
            yield (*before, (count, below), *after)
        for smaller in without_one(below):
            if smaller or not head:
                yield (*before, (head, smaller), *after)


def fewer(head: str) -> list[str]:
    """A loop of fewer rounds."""
    found = re.fullmatch(r"(for \w+ in range\()(\d+)(\):)", head)
    if found is None or int(found[2]) < 2:
        return []
    return [f"{found[1]}{count}{found[3]}" for count in range(1, int(found[2]))]


def simpler_lines(line: str) -> list[str]:
    """The same statement with less in it."""
    simple = []
    if re.match(r"\w+ = torch\.optim\.(?!lr_)", line) and ", lr=" in line and "SGD" not in line:
        simple.append(re.sub(r"torch\.optim\.\w+\((.*?), lr=.*\)$", r"torch.optim.SGD(\1, lr=0.1)", line))
    elif re.match(r"\w+ = torch\.optim\.SGD\(.*momentum", line):
        simple.append(re.sub(r", lr=.*\)$", ", lr=0.1)", line))
    if found := re.match(r"(\w+) = (?!mlp|share|score|fabric|copy|torch)\w+\(\)$", line):
        simple.append(f"{found[1]} = mlp()")
    if re.match(r"state = \{|fabric\.save", line):  # an object less in a checkpoint
        held = re.findall(r"'\w+': [\w.()]+, ", line)
        simple += [line.replace(item, "", 1) for item in held]
    return [text for text in simple if text != line]
