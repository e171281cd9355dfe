"""Programs of one form each (`forms.py`): its step begins a loop of the grammar's models and optimizers."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from string import Template

from forms import FORMS, Form
from grammar import KINDS, Node, Scene, closing, make_models, make_optimizers
from layouts import BY_NAME, LAYOUTS, Layout
from program import DIFFER, WARNED, Program
from statements import interjection, turn

NAMES = tuple(dict.fromkeys(form.kind for form in FORMS))
CHAINS = tuple(kind.name for kind in KINDS if kind.chain and not kind.alike and kind.x == "floats")


def program_of(seed: int, layout: str | None = None, kind: str | None = None) -> Program:
    """The program of this seed: a form of this kind, under this layout or another one that it has."""
    rng = random.Random(f"form {seed} {kind}")
    fitting = [form for form in FORMS if kind in (None, form.kind) and places(form, layout)]
    if not fitting:
        raise ValueError(f"No form of kind {kind} has a meaning under {layout}.")
    form = rng.choice(fitting)
    found = places(form, layout)
    place = rng.choices(found, [entry.weight for entry in found])[0]
    names = tuple(name for name in form.models or CHAINS if place.takes(name))
    precision = rng.choice([None] * 9 + ["32-true"]) if place.precision is None else place.precision or None
    scene = Scene(rng, replace(place, kinds=names, without=()), precision, quiet=True)
    make_models(scene)
    make_optimizers(scene)
    lines = [*scene.build, *looped(scene, form), *closing(scene)]
    return Program(seed, place.name, rng.choice(place.worlds), scene.precision, tuple(lines))


def places(form: Form, layout: str | None) -> list[Layout]:
    """The layouts in which a form has its meaning, or the one asked for."""
    asked = LAYOUTS if layout is None else [BY_NAME[layout]]
    takes = [place for place in asked if any(place.takes(name) for name in form.models or CHAINS)]
    return [place for place in takes if not (form.without and re.search(form.without, place.name))]


def looped(scene: Scene, form: Form) -> list[Node]:
    """What is said before the loop, and the loop: the form's step first, then turns of other optimizers."""
    model, optimizer = scene.models[0], next(o for o in scene.optimizers if scene.models[0] in o.models)
    names = {name: scene.one_of(texts) for name, texts in form.choices.items()}
    scene.seeds += 1
    names |= {"m": model.name, "o": optimizer.name, "seed": str(scene.seeds)}

    def said(text: str) -> tuple[Node, ...]:
        for _ in range(3):  # choices name choices
            text = Template(text).safe_substitute(names, x=scene.data(model.kind.x))
        return nodes(text.strip().splitlines())

    scene.drifts = scene.drifts or form.refused
    head = DIFFER if form.refused else WARNED if form.warned else f"# {form.kind}"
    step: Node = (head, said(form.step))
    after: list[Node] = []
    for other in [other for other in scene.optimizers if other is not optimizer and scene.chance(0.4)]:
        after += turn(scene, other)
    for _ in range(scene.rng.choice([0, 0, 0, 1, 2])):
        after += interjection(scene)
    loop = f"for step in range({scene.rng.choice([3, 4])}):"
    if form.loops:
        return [*said(form.once), step, *[(loop, (*scene.late, *after))] * bool(after)]
    return [*said(form.once), (loop, (*scene.late, step, *after))]


def nodes(lines: list[str]) -> tuple[Node, ...]:
    """Indented text as lines and blocks."""
    found: list[Node] = []
    while lines:
        line, lines = lines[0], lines[1:]
        below = next((at for at, text in enumerate(lines) if not text.startswith(" ")), len(lines))
        found.append((line, nodes([text[4:] for text in lines[:below]])) if below else line)
        lines = lines[below:]
    return tuple(found)
