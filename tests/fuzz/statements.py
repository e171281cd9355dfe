"""What a loop says: an optimizer's turn, and what may stand anywhere between its lines."""

from __future__ import annotations

from functools import partial

import drifts
from grammar import Model, Node, Optimizer, Scene, how_to_save, losses

# an optimizer's turn


def turn(scene: Scene, optimizer: Optimizer) -> list[Node]:
    """Gradients for one step, by one or several micro-batches, and the step."""
    lines: list[Node] = []
    model = scene.one_of(optimizer.models)
    frozen = [m for m in scene.models if m not in optimizer.models and m.trained]
    toggles = bool(frozen) and scene.chance(0.15)
    if toggles:
        lines += [f"{m.name}.requires_grad_(False)" for m in frozen]
    zero_first = scene.chance(0.6)
    if zero_first:
        lines += zero(scene, optimizer)
    form = 1.0 if scene.by_hand else scene.rng.random()
    if scene.by_hand:
        body = [line for m in optimizer.models for line in by_hand(scene, m)]
    elif form < 0.45:
        body = one_backward(scene, model)
    elif form < 0.9:
        body = accumulation(scene, model)
    elif form < 0.95:
        body = contrastive(scene, model)
    else:
        body = per_item(scene, optimizer, model)
    if form < 0.95:
        for other in [m for m in optimizer.models if m is not model]:
            body += one_backward(scene, other)
        if scene.chance(0.15):
            body += one_backward(scene, model)
    lines += body
    lines += after_backward(scene, optimizer, model)
    lines += step(scene, optimizer, model)
    if toggles:
        lines += [f"{m.name}.requires_grad_(True)" for m in frozen]
    if not zero_first or scene.chance(0.3):
        lines += zero(scene, optimizer)
    if optimizer.schedule and scene.chance(0.8):
        lines.append(f"{optimizer.schedule}.step()")
    return lines


def zero(scene: Scene, optimizer: Optimizer) -> list[Node]:
    """Clears gradients in one of the ways that people write."""
    model = scene.one_of(optimizer.models).name
    return [
        scene.one_of(
            [
                f"{optimizer.name}.zero_grad()",
                f"{optimizer.name}.zero_grad()",
                f"{optimizer.name}.zero_grad(set_to_none=False)",
                f"{model}.zero_grad()",
                f"{model}.zero_grad(set_to_none=False)",
                (f"for p in {model}.parameters():", ("p.grad = None",)),
                (f"for p in {model}.parameters():", (("if p.grad is not None:", ("p.grad.zero_()",)),)),
            ]
        )
    ]


def one_backward(scene: Scene, model: Model, factor: str = "") -> list[Node]:
    """Forward, loss, backward; perhaps with something between them."""
    # What nobody uses has zeros for a gradient there, as FSDPStrategy says.
    loss = losses(scene, model, whole=scene.chance(0.9) or scene.layout.zeros or scene.quiet)
    x, made = scene.fresh("x"), scene.fresh("loss")
    lines: list[Node] = [
        f"{x} = {scene.data(loss.x, loss.alike)}",
        f"{made} = {loss.text.replace('{x}', x)}{factor}",
    ]
    form, noted = 1.0 if scene.quiet else scene.rng.random(), made
    if form < 0.08:  # a loss of two forwards
        second = loss.text.replace("{x}", f"({x} + 1)" if loss.x == "floats" else x)
        lines.append(f"{made} = {made} + {second}")
    elif form < (0.10 if scene.layout.splits else 0.11) and loss.x == "floats":
        call = model.kind.calls[0].format(m=model.name, x="x")
        lines.append(f"{made} = {made} + slopes(lambda x: {call}, {x})")
    elif 0.11 < form < 0.13:
        if scene.pipeline:  # each stage adds the penalty of its own part
            lines.append(f"{(noted := scene.fresh('loss'))} = {made}")
        lines.append(f"{made} = {made} + 0.01 * sum(p.square().sum() for p in {model.name}.parameters())")
    if scene.free and noted == made and scene.chance(0.6):
        lines.append(f"{made} = {made} * torch.sigmoid(heat).mean()")
    if scene.chance(0.25):
        lines += interjection(scene)
    form = scene.rng.random()
    if form < 0.05:
        lines += [f"fabric.backward({made}, retain_graph=True)", f"fabric.backward({made})"]
    elif form < 0.10:
        other, twice = scene.fresh("h"), scene.fresh("loss")
        lines += [
            f"{other} = {model.kind.calls[0].format(m=model.name, x=x)}",
            f"{twice} = score({other})",
            f"fabric.backward({twice}, retain_graph=True)",
            f"fabric.backward(0.5 * score([tensor + 1 for tensor in tensors({other})]))",
        ]
    elif form < 0.13 and all(m.ready for m in scene.models if m.trained):
        lines.append(f"{made}.backward()")
    elif form < 0.135:
        lines.append(f"fabric.backward({made}, create_graph=True)")
    elif form < 0.18:
        cleared = tuple(f"{m.name}.zero_grad()" for m in scene.models) + ("heat.grad = None",) * scene.free
        lines += caught(scene, [f"fabric.backward({made})"], "backward", cleared)
    else:
        lines.append(f"fabric.backward({made})")
    return [*lines, f"note.mean('{noted}', {noted})"]


def by_hand(scene: Scene, model: Model) -> list[Node]:
    """Gradients by torch.autograd.grad."""
    loss, made = losses(scene, model), scene.fresh("loss")
    averaged = scene.one_of(["True", "True", "False"])
    return [
        f"{made} = {loss.text.replace('{x}', scene.data(loss.x, loss.alike))}",
        f"grads_by_hand(fabric, {model.name}, {made}, averaged={averaged})",
        f"note.mean('{made}', {made})",
    ]


def accumulation(scene: Scene, model: Model) -> list[Node]:
    """Several micro-batches, of which only the last (or none, or others) synchronises."""
    count = scene.rng.choice([2, 2, 3])
    form = scene.rng.random()
    names = [model.name]
    if len(scene.models) > 1 and scene.chance(0.5):
        names = [scene.one_of(scene.models).name, *names][: scene.rng.choice([1, 2])]
    if form < 0.25:  # the loop of the books
        body = one_backward(scene, model, f" / {count}")
        body = [relabelled(line) for line in body]
        return [
            (
                f"for part in range({count}):",
                ((f"with fabric.no_backward_sync({names[-1]}, enabled=part < {count - 1}):", tuple(body)),),
            )
        ]
    lines: list[Node] = []
    for index in range(count):
        body = one_backward(scene, model, f" / {count}")
        if (index < count - 1 and scene.chance(0.85)) or scene.chance(0.04):
            body = unsynced(scene, body, names)
        lines += body
        if scene.chance(0.1):
            lines += interjection(scene)
    return lines


def per_item(scene: Scene, optimizer: Optimizer, model: Model) -> list[Node]:
    """Summed losses of unequal batches, divided by the number of all items."""
    if model.kind.x != "floats" or not model.kind.chain or model.kind.alike:
        return one_backward(scene, model)
    scene.seeds += 1
    count, rows = scene.fresh("count"), f"uneven(fabric, floats({scene.seeds} + 100 * step + 1000 * part))"
    body = (
        f"x = {rows}",
        (
            f"with fabric.no_backward_sync({model.name}, enabled=part < 1):",
            (f"fabric.backward({model.name}(x).square().sum())",),
        ),
        f"{count} += len(x)",
    )
    alone = len(optimizer.models) == 1 and (scene.chance(0.6) or not optimizer.whole)
    whose = "" if alone else f", optimizer={optimizer.name}"
    divide = f"fabric.normalize_gradients({model.name}, {count}{whose})"
    cleared = [f"{m.name}.zero_grad()" for m in scene.models]  # means are not divided once more
    return [
        ("# the mean over all items", (*cleared, f"{count} = 0", ("for part in range(2):", body), divide))
    ]


def contrastive(scene: Scene, model: Model) -> list[Node]:
    """Rows of all ranks against each other."""
    if model.kind.x != "floats" or not model.kind.chain or model.kind.alike or scene.layout.shares_data:
        return one_backward(scene, model)
    z, x = scene.fresh("z"), scene.data("floats")
    return [
        f"{z} = fabric.all_gather({model.name}({x}), uneven='cat', sync_grads=True)",
        f"fabric.backward(({z} @ {z}.T).square().mean())",
    ]


def relabelled(line: Node) -> Node:
    """Another batch in each round of an inner loop."""
    if isinstance(line, str):
        return line.replace(" * step)", " * step + 1000 * part)")
    return line[0], tuple(relabelled(item) for item in line[1])


def unsynced(scene: Scene, body: list[Node], names: list[str]) -> list[Node]:
    """`body`, or its backward alone, or all but that, under no_backward_sync."""
    held = [f"fabric.no_backward_sync({name})" for name in dict.fromkeys(names)]
    head = "with " + ", ".join(held) + ":"
    form = scene.rng.random()
    if form < 0.08:  # entered one by one
        entered = [f"stack.enter_context({text})" for text in held]
        return [("with contextlib.ExitStack() as stack:", (*entered, *body))]
    if form < 0.55:
        return [(head, tuple(body))]
    if form < 0.9:
        return [
            (head, (line,)) if isinstance(line, str) and "fabric.backward(" in line else line for line in body
        ]
    at = next((i for i, line in enumerate(body) if "backward(" in str(line)), len(body))
    return [(head, tuple(body[:at])), *body[at:]]


def after_backward(scene: Scene, optimizer: Optimizer, model: Model) -> list[Node]:
    """What is done with gradients before the step."""
    form = scene.rng.random()
    name = model.name
    if form < 0.12:
        return [
            f"fabric.clip_gradients({name}, {optimizer.name}, max_norm={scene.one_of([0.05, 0.5, 100.0])})"
        ]
    if form < 0.18:
        return [f"fabric.clip_gradients({name}, {optimizer.name}, clip_val={scene.one_of([0.01, 0.1])})"]
    if form < 0.22 and not scene.pipeline:
        way = "clip_left_in" if scene.layout.name.endswith("scaled") else "clip_by_hand"
        return [f"{way}(fabric, {name}, 0.1)"]
    if form < 0.28:
        way = "assign_grads" if not scene.layout.splits and scene.chance(0.5) else "scale_by_hand"
        return [f"{way}({name}, 0.5)"]
    if form < 0.38 and not scene.pipeline:
        return [f"note.grads('grads of {name}', {name})"]
    return []


def step(scene: Scene, optimizer: Optimizer, model: Model) -> list[Node]:
    """The step, or one that is skipped, or twice, or with a closure."""
    form = scene.rng.random()
    line = f"{optimizer.name}.step()"
    if optimizer.closes:
        return by_closure(scene, optimizer, model)
    if form < 0.08:
        return [("if step % 2:", (line,))]
    if form < 0.12:
        return [line, line]
    if form < 0.15 and not scene.by_hand:
        return by_closure(scene, optimizer, model)
    if form < 0.18:
        return []
    return [line]


def by_closure(scene: Scene, optimizer: Optimizer, model: Model) -> list[Node]:
    """A step that makes its gradients itself, once or often."""
    loss, closure = losses(scene, model), scene.fresh("closure")
    text = loss.text.replace("{x}", scene.data(loss.x, loss.alike))
    body = (f"{optimizer.name}.zero_grad()", f"loss = {text}", "fabric.backward(loss)", "return loss")
    return [(f"def {closure}():", body), f"note.mean('closure', {optimizer.name}.step({closure}))"]


# what may stand anywhere


def interjection(scene: Scene) -> list[Node]:
    """A statement that users write between others."""
    makers = [
        (6, any_zero),
        (4, dropped_forward),
        (4, evaluation),
        (3, evaluation_by_rank),
        (2, verb),
        (2, failure),
        (2, state_dict),
        (2, saved),
        (2, weights_by_hand),
        (1, learning_rate),
        (1, average),
        (1, freeze),
        (1, scaled),
        (1, new_group),
        (1, extra_step),
        (1, metric),
        (1, generation),
        (1, whole_model),
        (0.3, lone_failure),
        (0.5, drift),
        (1.3, assigned),
        (0.4, hooked),
        (0.3, converted),
    ]
    loud: tuple = (evaluation_by_rank, generation, failure, lone_failure, freeze) if scene.quiet else ()
    loud += (drift, hooked, converted) if scene.quiet else ()
    makers = [(weight, maker) for weight, maker in makers if maker not in loud]
    maker = scene.rng.choices([m for _, m in makers], [w for w, _ in makers])[0]
    return maker(scene)


def any_zero(scene: Scene) -> list[Node]:
    return zero(scene, scene.one_of(scene.optimizers))


def call_of(scene: Scene, model: Model, seed: str) -> str:
    """A call on all rows of a batch that is the same on all ranks."""
    rows = f"{model.kind.x}({seed})"
    return scene.one_of(model.kind.calls).format(m=model.name, x=rows)


def dropped_forward(scene: Scene) -> list[Node]:
    """A forward with gradients that nobody uses."""
    model = scene.one_of(scene.models)
    scene.seeds += 1
    return [call_of(scene, model, f"{scene.seeds}")]


def evaluation(scene: Scene) -> list[Node]:
    """All ranks look at the same rows."""
    model = scene.one_of(scene.models)
    scene.seeds += 1
    look = f"note.same('look', score({call_of(scene, model, str(scene.seeds))}))"
    head = scene.one_of(["with torch.no_grad():", "with torch.no_grad():", "with torch.inference_mode():"])
    if scene.chance(0.6):
        return [f"{model.name}.eval()", (head, (look,)), f"{model.name}.train()"]
    return [(head, (look,))]


def evaluation_by_rank(scene: Scene) -> list[Node]:
    """Unequal numbers of batches, or rank zero alone."""
    model = scene.one_of(scene.models)
    scene.seeds += 1
    form = scene.rng.random()
    if form < 0.5:
        look = f"note.own(rank, 'look', score({call_of(scene, model, f'{scene.seeds} + 10 * part')}))"
        lines: list[Node] = [("for rank in ranks(fabric):", (("for part in range(1 + rank):", (look,)),))]
    else:
        look = f"note.own(0, 'look', score({call_of(scene, model, str(scene.seeds))}))"
        lines = [("if fabric.is_global_zero:", (look,))]
    lines = [("with torch.no_grad():", tuple(lines))]
    ways = scene.rng.random()
    if ways < 0.6 or model.kind.buffers:  # in training each rank would count its own forwards
        lines = [(f"with evaluating({model.name}):", tuple(lines))]  # one statement: nothing comes in between
    elif ways < 0.75 and form >= 0.5:
        lines = [("if fabric.is_global_zero:", (f"{model.name}.eval()", ("with torch.no_grad():", (look,)),
                                                f"{model.name}.train()"))]  # fmt: skip
    return lines


VERBS = [
    "note.same('sum', [fabric.all_reduce(ranked(fabric, lambda r: torch.arange(3.0) + r * n), "
    "reduce_op='sum') for n in (0, 1)])",
    "note.same('tree', fabric.all_reduce(ranked(fabric, lambda r: {'a': torch.ones(2), 'b': [r + 0.5]})))",
    "note.same('max', fabric.all_reduce(ranked(fabric, lambda r: torch.tensor([r, -r])), reduce_op='max'))",
    "note.same('stack', fabric.all_gather(ranked(fabric, lambda r: torch.full((2, 2), float(r)))))",
    "note.same('cat', fabric.all_gather(ranked(fabric, lambda r: torch.full((r, 2), r)), uneven='cat'))",
    "note.same('told', fabric.broadcast(ranked(fabric, lambda r: {'r': r, 't': torch.ones(2) * r}), src=0))",
    "note.same('objects', fabric.all_gather_object(ranked(fabric, lambda r: {'rank': r, 'name': 'x' * r})))",
    "note.each('given', fabric.gather(ranked(fabric, lambda r: torch.ones(2) * r), dst=0))",
    "note.each('part', fabric.scatter(ranked(fabric, lambda r: torch.arange(12.0).reshape(12, 1)), src=0))",
    "note.each('less', fabric.reduce_scatter(ranked(fabric, lambda r: torch.ones(12) * r), reduce_op='sum'))",
    "note.each('swapped', fabric.all_to_all(ranked(fabric, lambda r: torch.arange(12.0) + 100 * r)))",
    "note.same('any', fabric.any(ranked(fabric, lambda r: r == 1)))",
    "note.same('all', fabric.all(ranked(fabric, lambda r: r < 9)))",
    "note.same('agreed', fabric.agree({'lr': 0.1, 'step': step}))",
    "fabric.barrier()",
    "fabric.print('step', step)",
    "fabric.log_dict({'a': 1.0, 'b': torch.ones(())}, step, sync_dist=True)",
]


def verb(scene: Scene) -> list[Node]:
    """A collective on what ranks have of their own."""
    return [scene.one_of(VERBS)]


def metric(scene: Scene) -> list[Node]:
    """A metric of all rows, of which each rank has seen its own."""
    model, name = scene.one_of(scene.models), scene.fresh("metric")
    if not model.kind.chain or model.kind.alike or scene.layout.shares_data:
        return verb(scene)
    look = f"{name}.update({model.name}({scene.data(model.kind.x)}).square())"
    quiet = (f"{model.name}.eval()", ("with torch.no_grad():", (look,)), f"{model.name}.train()")
    return [f"{name} = MeanMetric()", *quiet, f"note.same('{name}', fabric.compute_metrics({name}))"]


def generation(scene: Scene) -> list[Node]:
    """A method that calls the model again and again, on rank zero."""
    models = [m for m in scene.models if m.kind.name == "methods"]
    if not models:
        return evaluation_by_rank(scene)
    name = models[0].name
    call = f"note.own(0, 'generated', {name}.generate(floats(3)))"
    return [f"{name}.eval()", ("if fabric.is_global_zero:", (call,)), f"{name}.train()"]


def whole_model(scene: Scene) -> list[Node]:
    """What one rank does alone, with the whole model."""
    models = [m for m in scene.models if m.ready]
    if not models:
        return verb(scene)
    model = scene.one_of(models)
    scene.seeds += 1
    call = scene.one_of(model.kind.calls).format(m="alone", x=f"{model.kind.x}({scene.seeds})")
    look = ("with torch.no_grad():", (f"note.own(0, 'alone', score({call}))",))
    return [
        (f"with fabric.whole({model.name}) as alone:", (("if alone is not None:", ("alone.eval()", look)),))
    ]


def caught(scene: Scene, body: list[Node], where: str, then: tuple[Node, ...] = ("pass",)) -> list[Node]:
    """`body` fails on all ranks, and the loop goes on."""
    tried = (f"with armed('{where}'):", tuple(body))
    return [("", (("try:", (tried,)), ("except (OnPurpose, RankError):", then)))]


def failure(scene: Scene) -> list[Node]:
    """A forward or a loss that raises."""
    model = scene.one_of(scene.models)
    scene.seeds += 1
    call = call_of(scene, model, str(scene.seeds))
    form = scene.rng.random()
    if form < 0.6:
        return caught(scene, [call], "forward")
    tried = ("try:", (f"broken = score({call})", "raise OnPurpose('in the loss')"))
    return [("", (tried, ("except OnPurpose:", ("pass",))))]


def lone_failure(scene: Scene) -> list[Node]:
    """Rank 1 fails before a call that the others make, and its loop goes on.

    Not before a backward or a forward of a split model: what rank 1 sends next, gloo takes for an answer,
    and ends the process where its size is another.
    """
    lone: Node = ("if fabric.global_rank == 1:", ("raise OnPurpose('on rank 1')",))
    body = [*scene.one_of([verb, evaluation])(scene), "fabric.barrier()"]
    return [("", (("try:", (lone, *body)), ("except OnPurpose:", ("pass",))))]


drift = partial(drifts.drift, instead=verb)


def state_dict(scene: Scene) -> list[Node]:
    """States are looked at, or kept and taken back."""
    thing = scene.one_of([*scene.models, *scene.optimizers])
    name, kept = thing.name, scene.fresh("kept")
    if isinstance(thing, Optimizer):
        take: list[Node] = [f"{kept} = copy.deepcopy({name}.state_dict())", f"{name}.load_state_dict({kept})"]
        return [take[0]] if scene.chance(0.5) else take
    if scene.chance(0.5):
        return [f"note.same('weights', {name}.state_dict())"]
    return [
        f"{kept} = {{k: v.clone() for k, v in {name}.state_dict().items()}}",
        f"{name}.load_state_dict({kept})",
    ]


def saved(scene: Scene) -> list[Node]:
    """A file is written, and read."""
    model, path = scene.one_of(scene.models), f"folder / '{scene.fresh('file')}.pt'"
    form = scene.rng.random()
    if form < 0.4:
        optimizer = scene.one_of(scene.optimizers)
        state = f"{{'m': {model.name}, 'o': {optimizer.name}, 'n': step}}"
        lines: list[Node] = [f"fabric.save({path}, {state}{how_to_save(scene)})"]
        return [*lines, f"fabric.load({path}, {state})"] if scene.chance(0.5) else lines
    what = (
        f"{model.name}.state_dict()" if form < 0.7 or not model.ready else f"{model.name}.module.state_dict()"
    )
    return [
        f"fabric.save({path}, {{'m': {what}}}, format='full')",
        f"note.same('file', torch.load({path}, weights_only=True)['m'])",
    ]


def weights_by_hand(scene: Scene) -> list[Node]:
    """Weights are decayed, clamped or copied by the loop itself."""
    if scene.precision == "bf16-mixed":
        return verb(scene)  # autocast's copies of weights, where they are used, do not see it
    name = scene.one_of(scene.models).name
    line = scene.one_of(["p.mul_(0.95)", "p.clamp_(-0.5, 0.5)", "p.add_(0.01)"])
    return [("with torch.no_grad():", ((f"for p in {name}.parameters():", (line,)),))]


def assigned(scene: Scene) -> list[Node]:
    """Weights or gradients get other memory, which is refused where they are split."""
    name = scene.one_of(scene.models).name
    if scene.layout.splits and scene.chance(0.6):
        return verb(scene)
    if scene.precision == "bf16-mixed" or scene.chance(0.5):
        return [f"assign_grads({name}, 0.5)"]
    if not scene.layout.splits and scene.chance(0.5):  # torch flattens no tensor that is split unevenly
        return [f"assign_weights({name}, 0.95)"]
    return [(f"for p in {name}.parameters():", ("p.data = p.data * 0.95",))]


def hooked(scene: Scene) -> list[Node]:
    """Hooks of the user's on parameters."""
    how = scene.one_of(["'tensor'", "'accumulated'"])
    return [("if step == 0:", (f"add_hooks({scene.one_of(scene.models).name}, {how})",))]


def converted(scene: Scene) -> list[Node]:
    """A model is converted after setup, and back: the next backward is refused."""
    there_and_back = ".float().double()" if scene.precision in (None, "64-true") else ".double().float()"
    return [("if step == 1:", (scene.one_of(scene.models).name + there_and_back,))]


def average(scene: Scene) -> list[Node]:
    """A moving average of one model's weights in another of the same kind."""
    pairs = [
        (a, b)
        for a in scene.models
        for b in scene.models
        if a is not b and a.kind is b.kind and a.ready == b.ready
    ]
    if not pairs:
        return weights_by_hand(scene)
    to, of = scene.one_of(pairs)
    if scene.chance(0.2):
        return [f"{to.name}.load_state_dict({of.name}.state_dict())"]
    pair = f"for e, p in zip({to.name}.parameters(), {of.name}.parameters()):"
    return [("with torch.no_grad():", ((pair, ("e.mul_(0.9).add_(p, alpha=0.1)",)),))]


def learning_rate(scene: Scene) -> list[Node]:
    name = scene.one_of(scene.optimizers).name
    return [(f"for group in {name}.param_groups:", ("group['lr'] *= 0.9",))]


def freeze(scene: Scene) -> list[Node]:
    """A part is frozen, or thawed."""
    name = scene.one_of(scene.models).name
    flag = scene.one_of(["True", "False"])
    part = scene.one_of(["[:2]", "[-1:]", "[:1]"])
    body = (f"for p in list({name}.parameters()){part}:", (f"p.requires_grad_({flag})",))
    return [("if step == 1:", (body,))]


def scaled(scene: Scene) -> list[Node]:
    return [f"scale_by_hand({scene.one_of(scene.models).name}, 0.5)"]


def new_group(scene: Scene) -> list[Node]:
    """Parameters that come to an optimizer later."""
    optimizer, model = scene.one_of(scene.optimizers), scene.one_of(scene.models)
    add = f"{optimizer.name}.add_param_group({{'params': list({model.name}.parameters())[:1], 'lr': 0.01}})"
    return [("if step == 1:", (add,))]


def extra_step(scene: Scene) -> list[Node]:
    # Fused, a step between a forward and its backward changes weights without torch's seeing it.
    fused = any("fused=True" in str(line) for line in scene.build)
    plain = [] if fused else [optimizer for optimizer in scene.optimizers if not optimizer.closes]
    return [f"{scene.one_of(plain).name}.step()"] if plain else verb(scene)
