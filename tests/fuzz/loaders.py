"""Loops over loaders of every kind, and going on in the middle of an epoch."""

from __future__ import annotations

from grammar import Model, Node, Optimizer, Scene, losses

SIZE = "batch_size=12 // parts(fabric)"
TRAINED = [  # whose global batches are known
    f"DataLoader(Rows({{n}}), {SIZE})",
    f"DataLoader(Rows({{n}}), {SIZE}, shuffle=True)",
    f"DataLoader(Rows({{n}}), {SIZE}, shuffle=True, drop_last=True)",
    f"DataLoader(Rows({{n}}), {SIZE}, sampler=Backwards({{n}}))",
    f"DataLoader(Rows({{n}}), {SIZE}, sampler=Drawn({{n}}))",
    "DataLoader(Rows({n}), batch_sampler=BatchSampler(Backwards({n}), 12 // parts(fabric), False))",
    f"DataLoader(Rows({{n}}), {SIZE}, num_workers=2)",
    f"DataLoader(Rows({{n}}), {SIZE}, shuffle=True, num_workers=2)",
    f"DataLoader(Stream({{n}}), {SIZE})",
    f"DataLoader(Stream({{n}}, 'workers'), {SIZE})",
]
SEEN = [  # of which every sample is seen once, in some order
    "DataLoader(Rows({n}), batch_size=3)",
    "DataLoader(Rows({n}), batch_size=3, num_workers=2)",
    "DataLoader(Stream({n}), batch_size=2)",
    "DataLoader(Stream({n}), batch_size=2, num_workers=2)",
    "DataLoader(Stream({n}, 'workers'), batch_size=2, num_workers=2)",
    "DataLoader(Stream({n}, 'group'), batch_size=2)",
    "DataLoader(Stream({n}, 'all'), batch_size=2, num_workers=2)",
    "DataLoader(Stream({n}, place(fabric)), batch_size=2)",
    "DataLoader(Named({n}, *place(fabric)), batch_size=2)",
]


def data_loop(scene: Scene, interjection) -> list[Node]:
    """A loop over a loader, of whose models one is trained."""
    if scene.chance(0.4):
        return look_through(scene) if scene.chance(0.8) else order_kept(scene)
    optimizer = scene.one_of(scene.optimizers)
    models = [m for m in optimizer.models if m.kind.x == "floats" and not m.kind.alike]
    if not models or optimizer.closes:
        return look_through(scene)
    name, make = made_loader(scene)
    rounds = epochs(scene, name, optimizer, scene.one_of(models), interjection)
    if not scene.chance(0.3):
        return [*make, *rounds]
    path, state = f"folder / '{name}.pt'", f"{{'loader': {name}}}"
    return [*make, *rounds, f"fabric.save({path}, {state})", *make, f"fabric.load({path}, {state})", *rounds]


def made_loader(scene: Scene) -> tuple[str, list[Node]]:
    """A loader's variable, and the lines that make it."""
    name, count = scene.fresh("loader"), 12 * scene.rng.choice([1, 2, 3])
    made = f"{name} = {scene.one_of(TRAINED).format(n=count)}"
    return name, [made, f"{name} = fabric.setup_dataloaders({name})"]


def epochs(
    scene: Scene, name: str, optimizer: Optimizer, model: Model, interjection, broken: float = 0.3
) -> list[Node]:
    """Two epochs, or, where they are broken off, their beginnings."""
    loss = losses(scene, model)
    if loss.alike:
        return look_through(scene)
    body: list[Node] = [
        f"note.seen('{name}', ids)",
        f"fabric.backward({loss.text.replace('{x}', 'x')})",
        f"{optimizer.name}.step()",
        f"{optimizer.name}.zero_grad()",
    ]
    if scene.chance(0.3):
        body[(at := scene.rng.randint(0, 4)) : at] = interjection(scene)
    if scene.chance(broken):
        body.append((f"if {name}.batches_done == {scene.rng.randint(1, 3)}:", ("break",)))
    return [("for step in range(2):", ((f"for ids, x in {name}:", tuple(body)),))]


def order_kept(scene: Scene) -> list[Node]:
    """README: the order is a function of the seed, the epoch and the sampler alone."""
    count, epoch = scene.rng.choice([24, 25]), scene.rng.choice([0, 1, 2])
    how = scene.one_of(["shuffle=True", f"sampler=Drawn({count})"])
    if "Drawn" in how:  # its own generator goes on from epoch to epoch
        epoch = 0
    made = f"DataLoader(Rows({count}), batch_size=4, {how})"
    first, again = scene.fresh("loader"), scene.fresh("loader")
    return [
        "fabric.seed_everything(3, verbose=False)",
        f"{first} = fabric.setup_dataloaders({made})",
        (
            f"for epoch in range({epoch + 1}):",
            (f"seen = [number for ids, x in {first} for number in ids.tolist()]",),
        ),
        "fabric.seed_everything(3, verbose=False)",
        f"{again} = fabric.setup_dataloaders({made})",
        f"{again}.set_epoch({epoch})",
        f"note.promised('order', seen == [number for ids, x in {again} for number in ids.tolist()])",
    ]


def look_through(scene: Scene) -> list[Node]:
    """Every sample once, whoever sees it."""
    name, count = scene.fresh("loader"), scene.rng.choice([5, 12, 23, 24])
    extra = scene.one_of(["", "", ", uneven='exact'"])
    quiet = scene.chance(0.3)
    if "Stream({n}, " in (kind := scene.one_of(SEEN)) or "Named" in kind:
        count = count if quiet else 24  # in training ranks of unequal length stop together
    body = (f"for ids, x in {name}:", ("ids_seen += ids.tolist()",))
    lines: list[Node] = [
        f"{name} = fabric.setup_dataloaders({kind.format(n=count)}{extra})",
        ("for step in range(2):", ("ids_seen = []", body, f"note.every('{name}', ids_seen, {count})")),
    ]
    return [*lines[:1], ("with torch.no_grad():", tuple(lines[1:]))] if quiet else lines
