"""Random user programs: which models, optimizers and loops there are, and in which order things are said.

A generator writes lines; `statements.py` has what may stand anywhere in a loop. Nothing here runs
anything: what means nothing on one process (plain torch raises) is thrown away by the runner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from layouts import BY_NAME, CHAINS, LAYOUTS, Layout
from program import Node, Program


@dataclass(frozen=True)
class Kind:
    """A model: the text that makes it, and the calls that users write. `{m}`: the model, `{x}`: its input."""

    name: str
    make: str
    calls: tuple[str, ...] = ("{m}({x})",)
    partial: tuple[str, ...] = ()
    """Calls that leave parameters out."""
    x: str = "floats"
    chain: bool = False
    """Whether (rows, 4) becomes (rows, 4)."""
    alike: bool = False
    """Whether all ranks need one batch."""
    buffers: bool = False
    """Whether forwards in training change buffers."""
    weight: float = 2


KINDS = [
    Kind("mlp", "mlp()", chain=True, weight=6),
    Kind("deep", "deep()", chain=True, weight=4),
    Kind("leaky", "leaky()", chain=True),
    Kind("twice", "Twice()", chain=True),
    Kind("tied", "Tied()", x="words"),
    Kind("heads", "Heads()", partial=("{m}({x})['left']", "{m}({x})['right']")),
    Kind("branch", "Branch()", partial=("{m}({x}, way='left')", "{m}({x}, 'right')"), chain=True),
    Kind("records", "Records()", ("{m}({{'x': {x}}})", "{m}({{'x': {x}, 'scale': 0.5}}).scores"),
         ("{m}({{'x': {x}}}).extra",)),
    Kind("pair", "Pair()", ("{m}(({x}, {x}))", "{m}(pair=({x}, {x} + 1), gain=0.5)"),
         ("{m}(({x}, {x}))[0]",)),
    Kind("methods", "Methods()", ("{m}({x})", "{m}.loss({x})", "{m}.mixed({x})"), ("{m}.encode({x})",),
         chain=True, weight=3),
    Kind("checked", "Checked()", chain=True),
    Kind("reentrant", "Checked(reentrant=True)", chain=True, weight=1),
    Kind("partly", "Partly()", chain=True),
    Kind("batched", "Batched()", chain=True, alike=True, buffers=True),
    Kind("counting", "Counting()", chain=True, buffers=True),
    Kind("recurrent", "Recurrent()", x="words"),
    Kind("scaled", "Scaled()", chain=True, weight=1),
    Kind("phases", "Phases()", chain=True, weight=1),
    Kind("gaps", "Gaps()", chain=True),
    Kind("attention", "Attention()", chain=True),
    Kind("agent", "Agent()", chain=True),
    Kind("normal", "Hides('normal')", ("{m}({x}).mean",), weight=1),
    Kind("object", "Hides('object')", ("{m}({x}).out",), weight=1),
    Kind("closure", "Hides('closure')", ("{m}({x})()",), weight=1),
    Kind("list", "Hides('list')", ("collected({m}, {x})",), weight=1),
    Kind("veiled", "Hides('block')", weight=1),
    Kind("ordered", "Ordered(fabric.global_rank)", chain=True, weight=1),
    Kind("growing", "Growing()", chain=True, weight=1),
    Kind("follows", "Follows('lerp')", chain=True, weight=1),
    Kind("follows", "Follows('data')", chain=True, weight=1),
    Kind("sparse", "Sparse()", x="words", weight=0.02),  # most optimizers take none
]  # fmt: skip

AGENT = next(kind for kind in KINDS if kind.name == "agent")

OPTIMIZERS = [
    "torch.optim.SGD({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach={flag})",
    "torch.optim.Adam({p}, lr=0.02, eps=1e-3)",
    "torch.optim.Adam({p}, lr=0.02, eps=1e-3, amsgrad=True, foreach={flag})",
    "torch.optim.AdamW({p}, lr=0.02, eps=1e-3)",
    "torch.optim.AdamW({p}, lr=0.02, eps=1e-3, weight_decay=0.1, fused={flag})",
    "torch.optim.RMSprop({p}, lr=0.01, eps=1e-3, momentum=0.5)",
    "torch.optim.Adagrad({p}, lr=0.05, eps=1e-3)",
]
SCHEDULES = [
    "torch.optim.lr_scheduler.StepLR({o}, 2, 0.5)",
    "torch.optim.lr_scheduler.ExponentialLR({o}, 0.8)",
    "torch.optim.lr_scheduler.LambdaLR({o}, lambda n: 1 / (1 + n))",
    "torch.optim.lr_scheduler.OneCycleLR({o}, 0.1, 20)",
]


@dataclass
class Model:
    """A model of the program: its variable, what it is, and how it is used."""

    name: str
    kind: Kind
    trained: bool = True
    ready: bool = True
    """Whether it is set up."""


# Without a line search, which leaps at a rounding error.
LBFGS = "torch.optim.LBFGS({p}, lr=0.05, max_iter=3, history_size=2)"


@dataclass
class Optimizer:
    """An optimizer: its variable, the models whose parameters it holds, and its scheduler's variable."""

    name: str
    models: list[Model]
    schedule: str | None = None
    whole: bool = True
    """Whether it holds all that they have."""
    closes: bool = False
    """Whether its steps need a closure."""
    kept: bool = False
    """Whether it must be set up: forgotten, it would do what nobody promises anything of."""


@dataclass
class Loss:
    """`text` computes it from `{x}`; it gives gradients to `models`."""

    text: str
    models: list[Model]
    x: str
    alike: bool


@dataclass
class Scene:
    """What the statements of one program may name."""

    rng: random.Random
    layout: Layout
    precision: str | None = None
    models: list[Model] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    build: list[Node] = field(default_factory=list)
    """The lines that make everything: a resumed run makes it anew."""
    seeds: int = 0
    kept: int = 0
    by_hand: bool = False
    """Whether all turns make gradients without `fabric.backward`."""
    free: bool = False
    """Whether there is a parameter of no model, `heat`."""
    drifts: bool = False
    """Whether a statement makes replicas differ."""
    quiet: bool = False
    """Whether what many layouts refuse is left out."""
    late: list[Node] = field(default_factory=list)
    """What a loop begins with: parts are thawed."""

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one_of(self, items):
        return self.rng.choice(list(items))

    def data(self, x: str, alike: bool = False) -> str:
        """A batch: this rank's rows, or where ranks must see one batch all rows."""
        self.seeds += 1
        rows = f"{x}({self.seeds} + 100 * step)"
        return rows if alike else f"share(fabric, {rows})"

    def fresh(self, stem: str) -> str:
        self.kept += 1
        return f"{stem}{self.kept}"

    @property
    def pipeline(self) -> bool:
        return self.layout.name.startswith("pipeline")


PAIRS, FORMS = 0.2, 0.1  # of all programs


def is_formed(seed: int) -> bool:
    """Whether the program of this seed has a form, if no layout is asked for."""
    return random.Random(f"formed {seed}").random() < FORMS


def generate(seed: int, layout: str | None = None, kind: str | None = None) -> Program:
    """The program of this seed; `layout` may be two, with a colon between them, either of them left out.

    `kind` is one of forms.py, or "any" of them; without it some programs have a form.
    """
    from drifts import another_order
    from kinds import program_of
    from loaders import data_loop
    from pairs import pair
    from statements import interjection, turn

    if kind is not None or (layout is None and is_formed(seed)):
        return program_of(seed, layout, None if kind == "any" else kind)
    if layout is None and random.Random(f"pair {seed}").random() < PAIRS:
        layout = ":"
    if layout and ":" in layout:
        return pair(seed, *layout.split(":"))
    rng = random.Random(seed)
    chosen = rng.choices(LAYOUTS, [entry.weight for entry in LAYOUTS])[0]
    if layout is not None:
        chosen = BY_NAME[layout]
    precision = rng.choice([None] * 14 + ["64-true", "32-true", "bf16-mixed"])
    precision = precision if chosen.precision is None else chosen.precision or None
    scene = Scene(rng, chosen, precision)
    scene.by_hand = not (chosen.splits or chosen.shares_data) and scene.chance(0.04)
    make_models(scene)
    make_optimizers(scene)
    lines = list(scene.build)
    lines += another_order(scene) if scene.chance(0.05) else []
    lines += loop(scene, turn, interjection)
    if scene.chance(0.15):
        lines += data_loop(scene, interjection)
    if scene.chance(0.25):
        lines += resume(scene)
        lines += loop(scene, turn, interjection)
    lines += closing(scene)
    return Program(seed, chosen.name, rng.choice(chosen.worlds), scene.precision, tuple(lines))


def make_models(scene: Scene) -> None:
    """One to three models, and what stands between their making and setup."""
    rng = scene.rng
    kinds = [kind for kind in KINDS if scene.layout.takes(kind.name)]
    count = rng.choices([1, 2, 3], [6, 4, 1])[0]
    by_user = scene.layout.name in ("mesh", "tensor", "tensor-data")  # whose function splits each model anew
    shares = count > 1 and scene.layout.takes("agent") and not by_user and scene.chance(0.2)
    for name in ("net", "other", "third")[:count]:
        kind = rng.choices([AGENT] if shares else kinds, [1] if shares else [kind.weight for kind in kinds])[
            0
        ]
        model = Model(name, kind)
        made: Node = f"{name} = {kind.make}"
        if shares and name != "net":
            made = f"{name} = " + scene.one_of(
                ["Agent(net.encoder)"] * 3 + ["nn.Sequential(net, nn.Linear(4, 4))"]
            )
        if scene.precision is not None and scene.chance(
            0.3
        ):  # where none is named the default dtype is not ours
            made = ("with fabric.init_module():", (made,))
        start = f"torch.manual_seed({rng.randrange(9)}"
        if count == 1 and scene.chance(0.15):  # rank zero's values count
            scene.build += [f"{start} + fabric.global_rank)", made, f"{start})"]
        else:
            scene.build += [f"{start})", made]
        if name != "net" and not shares and scene.chance(0.3):  # an average of weights, or a target network
            model.kind, model.trained = scene.models[0].kind, scene.chance(0.3)
            scene.build[-1] = f"{name} = copy.deepcopy({scene.models[0].name})"
        if count == 1 and scene.chance(0.08):  # a copy of it that is not set up keeps the prefix of its names
            scene.build.append(f"{name} = own_ddp(fabric, {name})")
        if not model.trained:
            scene.build.append(f"{name}.requires_grad_(False)")
        else:
            freeze_first(scene, model)
        scene.models.append(model)


def freeze_first(scene: Scene, model: Model) -> None:
    """Its first layer is frozen before setup, perhaps, and thawed in the loop, perhaps."""
    first = f"for p in list({model.name}.parameters())[:2]:"
    frozen = scene.chance(0.12 if scene.layout.splits else 0.08)
    if model.kind.name == "reentrant" and scene.layout.zeros:
        return  # without an input to differentiate nobody uses the blocks: zeros there, as FSDPStrategy says
    if frozen:
        scene.build.append((first, ("p.requires_grad_(False)",)))
    if (frozen or model.kind.name == "partly") and scene.chance(0.5 if scene.layout.splits else 0.05):
        scene.late.append(("if step == 1:", ((first, ("p.requires_grad_(True)",)),)))
        if scene.layout.splits and scene.layout.precision is None and scene.chance(0.6):
            scene.precision = "bf16-mixed"  # what was frozen has no gradient dtype of its own yet


def make_optimizers(scene: Scene) -> None:
    """One to three optimizers, before or after setup in each way that setup can be written."""
    rng = scene.rng
    trained = [model for model in scene.models if model.trained]
    owners = [[model] for model in trained]
    if len(owners) > 1 and scene.chance(0.3):
        owners = [trained]  # one for all of them
    elif scene.chance(0.1):
        owners = [owners[0], *owners]  # two of one model
    for index, models in enumerate(owners):
        scene.optimizers.append(Optimizer(("opt", "opt2", "opt3", "opt4")[index], models))
    for model in scene.models:
        set_up(scene, model)
    if not scene.by_hand and scene.chance(0.15):
        free_parameter(scene)
    for optimizer in scene.optimizers:
        made = any(line_assigns(line, optimizer.name) for line in scene.build)
        if not made:
            scene.build.append(made_of(scene, optimizer))
            # Forgotten, an optimizer with a closure goes by this rank's loss (fabric/README.md).
            if scene.chance(0.9) or optimizer.closes or optimizer.kept:
                scene.build.append(f"{optimizer.name} = fabric.setup_optimizers({optimizer.name})")
        if scene.chance(0.3):
            optimizer.schedule = scene.fresh("plan")
            scene.build.append(f"{optimizer.schedule} = {rng.choice(SCHEDULES).format(o=optimizer.name)}")


def free_parameter(scene: Scene) -> None:
    """A parameter of no model, in an optimizer of its own; rank zero's values count."""
    scene.free = True
    scene.build += [
        "heat = nn.Parameter(torch.full((3,), 1.0 + fabric.global_rank))",
        f"tune = {scene.one_of(OPTIMIZERS[:3]).format(p='[heat]', flag='False')}",
        "tune = fabric.setup_optimizers(tune)",
    ]


def set_up(scene: Scene, model: Model) -> None:
    """`fabric.setup` of a model, with the optimizers that are its alone where chance has it."""
    own = [o for o in scene.optimizers if o.models == [model]]
    before = scene.chance(0.75)
    late = not before or scene.chance(0.2)
    if before:
        scene.build += [made_of(scene, optimizer) for optimizer in own]
    if not model.trained and scene.chance(0.3):
        model.ready = False  # a teacher that nobody set up
        return
    first = model is scene.models[0]  # set up: with no model at all there is a warning only
    if before and model.trained and not (first or scene.pipeline or scene.by_hand) and scene.chance(0.06):
        model.ready = False  # forgotten: its optimizers are set up, perhaps, which averages their gradients
        ready = [o for o in own if o.closes or o.kept or scene.chance(0.5)]
        scene.build += [f"{o.name} = fabric.setup_optimizers({o.name})" for o in ready]
        return
    if model.kind.name in CHAINS and scene.chance(0.03):  # others take long to compile
        scene.build.append(f"{model.name} = compiled(fabric, {model.name})")
    if late or not own:
        verb = scene.one_of(["setup", "setup_module"])
        scene.build.append(f"{model.name} = fabric.{verb}({model.name})")
        if before and (scene.chance(0.75) or any(o.closes or o.kept for o in own)):
            scene.build += [f"{o.name} = fabric.setup_optimizers({o.name})" for o in own]
        return
    names = ", ".join([model.name, *(o.name for o in own)])
    scene.build.append(f"{names} = fabric.setup({names})")


def line_assigns(line: Node, name: str) -> bool:
    return isinstance(line, str) and line.startswith(f"{name} = torch.optim")


def made_of(scene: Scene, optimizer: Optimizer) -> str:
    """An optimizer of its models' parameters: all, in groups, or those that are trained."""
    lists = [f"{model.name}.parameters()" for model in optimizer.models]
    held = lists[0] if len(lists) == 1 else "[" + ", ".join(f"*{text}" for text in lists) + "]"
    if len(lists) > 1 and any(model.kind is AGENT for model in optimizer.models):  # each once
        held = f"list(dict.fromkeys({held}))"
    form = scene.rng.random() if len(lists) == 1 else 1.0
    if form < 0.15:
        held = f"[{{'params': list({lists[0]})[:1], 'lr': 0.03}}, {{'params': list({lists[0]})[1:]}}]"
    elif form < 0.25:
        held, optimizer.whole = f"[p for p in {lists[0]} if p.requires_grad]", False
    elif form < 0.30:
        held, optimizer.whole = f"list({lists[0]})[1:]", False
    elif scene.precision in (None, "64-true") and scene.chance(0.01 if scene.layout.splits else 0.05):
        optimizer.closes = True
        return f"{optimizer.name} = {LBFGS.format(p=held)}"
    flag = scene.one_of(["True", "False"])
    # Others divide a gradient by its own size: in bfloat16 that makes steps of noise.
    kinds = OPTIMIZERS[:3] if scene.precision == "bf16-mixed" else OPTIMIZERS
    line = f"{optimizer.name} = {scene.one_of(kinds).format(p=held, flag=flag)}"
    if scene.quiet or scene.by_hand or not scene.chance(0.01):
        return line
    from drifts import made_otherwise

    optimizer.kept = True
    return made_otherwise(scene, line)


def losses(scene: Scene, model: Model, whole: bool = True) -> Loss:
    """A loss that reaches `model`, perhaps through others, or with them."""
    calls = model.kind.calls if whole else (*model.kind.calls, *model.kind.partial)
    call = scene.one_of(calls).format(m=model.name, x="{x}")
    x, alike, reached = model.kind.x, model.kind.alike, [model]
    before = [m for m in scene.models if m is not model and m.kind.chain and m.kind.x == "floats"]
    if x == "floats" and before and scene.chance(0.35):
        inner = scene.one_of(before)
        call = call.replace("{x}", f"{inner.name}({{x}})")
        if scene.chance(0.4):
            call = call.replace(f"{inner.name}({{x}})", f"{inner.name}({{x}}).detach()")
        elif inner.trained:
            reached.append(inner)
        alike = alike or inner.kind.alike
    number = ".loss(" in call or ".mixed(" in call
    text = call if number else f"score({call})"
    if model.kind.chain and not number and x == "floats" and ".encode(" not in call and scene.chance(0.3):
        distance = "square" if scene.precision == "bf16-mixed" else "abs"  # whose slope leaps at a rounding
        text = f"({call} - {{x}}).{distance}().mean()"
    return Loss(text, reached, x, alike)


def loop(scene: Scene, turn, interjection) -> list[Node]:
    """The loop over steps: a turn of each optimizer, and other statements in between."""
    body: list[Node] = list(scene.late)
    order = list(scene.optimizers)
    if scene.chance(0.2):
        scene.rng.shuffle(order)
    for optimizer in order:
        body += turn(scene, optimizer)
    if scene.free:
        body += ["tune.step()", *["tune.zero_grad()"] * scene.chance(0.8)]
    for _ in range(scene.rng.choice([0, 0, 1, 1, 2, 3])):
        body[(at := scene.rng.randint(0, len(body))) : at] = interjection(scene)
    return [(f"for step in range({scene.rng.choice([2, 3, 3, 4])}):", tuple(body))]


def how_to_save(scene: Scene) -> str:
    """In either format, in the call or beside the loop."""
    form = scene.one_of(["", "", ", format='full'", ", format='sharded'"])
    return form + scene.one_of(["", ", wait=False"])


def resume(scene: Scene) -> list[Node]:
    """Saved, everything made anew, and loaded; or loaded in place."""
    path = f"folder / '{scene.fresh('saved')}.pt'"
    named = [*(m.name for m in scene.models), *(o.name for o in scene.optimizers)]
    named += [o.schedule for o in scene.optimizers if o.schedule] + ["heat", "tune"] * scene.free
    state = "{" + ", ".join(f"'{name}': {name}" for name in named) + ", 'epoch': 3}"
    lines: list[Node] = [f"fabric.save({path}, {state}{how_to_save(scene)})"]
    if scene.chance(0.7):
        lines += scene.build
    return [*lines, f"state = {state}", f"fabric.load({path}, state)", "note.same('epoch', state['epoch'])"]


def closing(scene: Scene) -> list[Node]:
    """What is compared at the end."""
    lines: list[Node] = ["fabric.check_replicas()"] * scene.drifts
    lines += [f"note.same('{m.name}', {m.name}.state_dict())" for m in scene.models]
    lines += ["note.same('heat', heat)", "note.optimizer('tune', tune)"] * scene.free
    raw = forgotten(scene) if scene.pipeline else []
    return [*lines, *(f"note.optimizer('{o.name}', {o.name})" for o in scene.optimizers if o not in raw)]


def forgotten(scene: Scene) -> list[Optimizer]:
    """The optimizers that are not set up."""
    return [o for o in scene.optimizers if f"{o.name} = fabric.setup" not in text(scene.build)]


def text(lines: list[Node]) -> str:
    """Of simple lines."""
    return "\n".join(line for line in lines if isinstance(line, str)).replace(", opt", "\nopt")
