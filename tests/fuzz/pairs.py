"""Programs of two parts: trained and saved under one strategy, made anew and gone on with under another.

The second part has the build lines of the first, with other values in its models: what is not loaded shows.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from grammar import KINDS, Node, Scene, closing, forgotten, how_to_save, loop, make_models, make_optimizers
from layouts import BY_NAME, LAYOUTS, Layout
from loaders import epochs, made_loader
from program import Program
from statements import interjection, turn

PATH = "folder / 'pair.pt'"


def pair(seed: int, first: str = "", second: str = "") -> Program:
    """The pair of this seed; of layouts that are not named, two that take the same models."""
    rng = random.Random(seed)
    one = chosen(rng, first, BY_NAME.get(second))
    two = chosen(rng, second, one)
    precision = rng.choice([None] * 14 + ["64-true", "64-true", "64-true", "32-true", "bf16-mixed"])
    both = common(one, two)
    precision = precision if both.precision is None else both.precision or None
    scene = Scene(rng, both, precision, quiet=rng.random() < 0.8)
    make_models(scene)
    make_optimizers(scene)
    keeper = Keeper(scene)
    scene.layout = one
    begun = [*scene.build, *keeper.made, *loop(scene, turn, interjection), *keeper.rounds(), *closing(scene)]
    begun += keeper.saved()
    if scene.chance(0.3):  # what comes after a save is not in it
        begun += loop(scene, turn, interjection)
    program = Program(seed, one.name, rng.choice(one.worlds), scene.precision, tuple(begun))
    scene.layout, scene.precision = two, keeper.precision
    going_on = [*keeper.anew(), *closing(scene), *keeper.rounds(), *loop(scene, turn, interjection)]
    if scene.chance(0.1):  # over the one that was loaded
        going_on += [*keeper.saved(), *keeper.loaded(keeper.named)]
    going_on += closing(scene)
    then = Program(seed, two.name, rng.choice(two.worlds), scene.precision, tuple(going_on))
    return replace(program, then=then)


def chosen(rng: random.Random, name: str, other: Layout | None) -> Layout:
    """The layout of this name, or any that goes with the other; as many draws either way."""
    fitting = [entry for entry in LAYOUTS if other is None or kinds(entry, other)]
    drawn = rng.choices(fitting, [entry.weight for entry in fitting])[0]
    return BY_NAME[name] if name else drawn


def kinds(one: Layout, two: Layout) -> tuple[str, ...]:
    """The models that both take."""
    return tuple(kind.name for kind in KINDS if one.takes(kind.name) and two.takes(kind.name))


def common(one: Layout, two: Layout) -> Layout:
    """What asks of the lines that make everything as much as both."""
    if not (names := kinds(one, two)):
        raise ValueError(f"No model is for {one.name} and for {two.name}.")
    precision = two.precision if one.precision is None else one.precision
    zeros, most = one.zeros or two.zeros, two if two.splits else one
    return replace(most, kinds=names, without=(), zeros=zeros, precision=precision)


class Keeper:
    """What goes from one part to the other, and how it is written and read."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.optimizer = scene, scene.one_of(scene.optimizers)
        self.named = [*(m.name for m in scene.models), *(o.name for o in scene.optimizers)]
        self.named += [o.schedule for o in scene.optimizers if o.schedule] + ["heat", "tune"] * scene.free
        self.made: list[Node] = []
        self.loader = None
        self.models = [m for m in self.optimizer.models if m.kind.x == "floats" and not m.kind.alike]
        if self.models and not self.optimizer.closes and scene.chance(0.3):
            self.loader, self.made = made_loader(scene)
        self.drawn = scene.chance(0.2)
        self.way = scene.one_of(["objects"] * 5 + ["state dicts", "by hand", "latest", "bare"])
        if self.way == "by hand" and forgotten(scene):  # torch's own load_state_dict: whole states for parts
            self.way = "objects"
        self.precision = scene.precision
        # bfloat16 has other optimizers; where none is named the default dtype is not init_module's.
        free = scene.precision != "bf16-mixed" and not any(o.closes for o in scene.optimizers)
        if free and scene.layout.precision is None and scene.chance(0.1):
            self.precision = scene.one_of(["64-true", "32-true"])

    def rounds(self) -> list[Node]:
        """A loop over the loader, which may stop in the middle of an epoch."""
        if self.loader is None:
            return []
        model = self.scene.one_of(self.models)
        return epochs(self.scene, self.loader, self.optimizer, model, interjection, broken=0.6)

    def state(self, names: list[str], epoch: int, form: str = "{0}") -> str:
        """The dictionary; `form` is what stands for an object in it."""
        held = [f"'{name}': {form.format(name)}" for name in names]
        held += [f"'{self.loader}': {form.format(self.loader)}"] * (self.loader is not None)
        held += ["'rng': " + form.format("fabric.rng_state()")] * self.drawn
        return "{" + ", ".join([*held, f"'epoch': {epoch}"]) + "}"

    def saved(self) -> list[Node]:
        lines: list[Node] = ["fabric.seed_everything(5, verbose=False)"] * self.drawn
        state = self.state(self.named, 3, "{0}.state_dict()" if self.way == "state dicts" else "{0}")
        how = how_to_save(self.scene)
        if self.way == "latest":
            return [*lines, f"fabric.save_latest(folder, {state}, step=7{', wait=False' * ('wait' in how)})"]
        if self.way == "bare":
            lines += [
                f"fabric.save(folder / '{name}.pt', {name}.state_dict(){how_to_save(self.scene)})"
                for name in self.named
            ]
        return [*lines, f"fabric.save({PATH}, {state}{how})"]

    def anew(self) -> list[Node]:
        """What makes everything in the second part, and loads it: all after setup, or some before."""
        scene, form = self.scene, self.scene.rng.random()
        # Models without values: not where they are not loaded, nor where an optimizer is there before.
        made = f"init_module({'empty_init=True' * (form > 0.6)})"
        build: list[Node] = []
        for line in scene.build:
            if isinstance(line, str):
                build.append(line.replace("manual_seed(", "manual_seed(9 + "))
            else:
                build.append((line[0].replace("init_module()", made), line[1]))
        names = list(self.named)
        if form < 0.15 and self.way == "objects":
            at = next(place for place, line in enumerate(build) if "fabric.setup" in str(line))
            there = [name for name in names if re.search(rf"\b{name} = ", str(build[:at]))]
            state = ", ".join(f"'{name}': {name}" for name in there)
            build[at:at] = [f"fabric.load({PATH}, {{{state}}})"]
            names = [name for name in names if name not in there]
        elif form < 0.3 and self.way != "bare":
            names.remove(scene.one_of(names))
        return [*build, *self.made, *self.loaded(names)]

    def loaded(self, names: list[str]) -> list[Node]:
        lines: list[Node] = []
        if self.way == "bare":
            lines += [f"fabric.load_raw(folder / '{name}.pt', {name})" for name in names]
            names = []
        if self.way == "by hand":
            lines.append(f"state = fabric.load({PATH})")
            lines += [f"{name}.load_state_dict(state['{name}'])" for name in [*names, self.loader] if name]
            lines += ["fabric.rng_state().load_state_dict(state['rng'])"] * self.drawn
        else:
            loose = ", strict=False" * self.scene.chance(0.1)
            lines.append(f"state = {self.state(names, 0)}")
            lines.append(
                f"note.same('step', fabric.load_latest(folder, state{loose}))"
                if self.way == "latest"
                else f"note.same('rest', sorted(fabric.load({PATH}, state{loose})))"
            )
        lines += ["note.same('drawn', torch.rand(2))"] * self.drawn
        return [*lines, "note.same('epoch', state['epoch'])"]
