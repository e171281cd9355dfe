"""Statements by which ranks come to differ. The package must refuse them: a number that differs is a failure.

Their lines stand under the comment DIFFER: a ReplicasDivergedError of a program without it is a false alarm.
"""

from __future__ import annotations

from grammar import Model, Node, Optimizer, Scene, forgotten
from program import DIFFER, ORDER


def drift(scene: Scene, instead) -> list[Node]:
    """One cause of drift; `closing` compares the replicas. `instead` makes a statement where none fits."""
    model, optimizer = scene.one_of(scene.models), scene.one_of(scene.optimizers)
    if not model.ready or scene.by_hand:
        return instead(scene)
    causes = [written_by_some]
    if optimizer not in forgotten(scene):  # which nobody compares
        causes += [rates, scheduler, limits]
    if not scene.layout.splits:  # parts of parameters have no replica
        causes += [written_by_rank]
    if scene.layout.name.startswith(("ddp", "hsdp")) and not optimizer.closes:
        causes += [gradients, extra_step] if scene.layout.name != "hsdp" else []
        causes += [drawn_anew]
    if scene.pipeline:  # each stage has parameters of its own
        causes = [cause for cause in causes if cause is not written_by_some]
    if not causes:
        return instead(scene)
    scene.drifts = True
    return [(DIFFER, tuple(scene.one_of(causes)(scene, model, optimizer)))]


def rates(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """Another learning rate on each rank."""
    return [
        (f"for group in {optimizer.name}.param_groups:", ("group['lr'] *= 1 + 0.5 * fabric.global_rank",))
    ]


def scheduler(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """A scheduler that goes by this rank's own loss."""
    name = scene.fresh("plateau")
    made = f"{name} = torch.optim.lr_scheduler.ReduceLROnPlateau({optimizer.name}, patience=0, factor=0.5)"
    return [("if step == 0:", (made,)), f"{name}.step(float(-step if fabric.global_rank else step))"]


def limits(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """Another limit of gradients on each rank."""
    limit = f"{scene.one_of(['clip_val', 'max_norm'])}=0.1 * (1 + fabric.global_rank)"
    return [f"fabric.clip_gradients({model.name}, {optimizer.name}, {limit})"]


def written_by_some(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """One rank writes weights."""
    write = ("with torch.no_grad():", ((f"for p in {model.name}.parameters():", ("p.mul_(0.5)",)),))
    if not scene.layout.splits and scene.chance(0.4):
        double = f"{{k: 2 * v for k, v in {model.name}.state_dict().items()}}"
        write = ("if True:", (f"{model.name}.load_state_dict({double})",))
    which = scene.one_of(["fabric.is_global_zero", "fabric.global_rank == 1"])
    return [(f"if {which}:", (write,)), *compared(scene)]


def written_by_rank(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """Each rank writes a value of its own."""
    loop = f"for p in {model.name}.parameters():"
    return [("with torch.no_grad():", ((loop, ("p.add_(0.1 * fabric.global_rank)",)),)), *compared(scene)]


def drawn_anew(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """Layers are initialised anew by numbers that each rank draws."""
    loop = f"for layer in {model.name}.modules():"
    body = ("if hasattr(layer, 'reset_parameters'):", ("layer.reset_parameters()",))
    return ["torch.manual_seed(fabric.global_rank)", (loop, (body,)), "torch.manual_seed(5)"]


def compared(scene: Scene) -> list[Node]:
    """zero1: an owner's next step would send its values, and replicas are equal again."""
    now = scene.layout.name.startswith("zero1") or scene.chance(0.3)
    return ["fabric.check_replicas()"] * now


def gradients(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """One rank changes its gradients before a step."""
    return [
        ("if fabric.global_rank == 1:", (f"scale_by_hand({model.name}, 0.5)",)),
        f"{optimizer.name}.step()",
    ]


def extra_step(scene: Scene, model: Model, optimizer: Optimizer) -> list[Node]:
    """One rank steps once more than others, or once less."""
    some = scene.one_of(["fabric.global_rank == 1", "fabric.is_global_zero"])
    return [(f"if {some}:", (f"{optimizer.name}.step()",))]


def another_order(scene: Scene) -> list[Node]:
    """Two models in another order on rank 1, in their first calls: an error that names both."""
    models = [model for model in scene.models if model.ready and model.trained]
    unused = scene.layout.name.startswith(
        "ddp-unused"
    )  # whose backwards reduce all models, and are not compared
    if len(models) < 2 or scene.by_hand or unused:
        return []
    scene.drifts = True
    calls = []
    for model in scene.rng.sample(models, 2):
        scene.seeds += 1
        x = f"share(fabric, {model.kind.x}({scene.seeds}))"
        calls.append(f"lambda: score({scene.one_of(model.kind.calls).format(m=model.name, x=x)})")
    head = f"for call in [{', '.join(calls)}][{ORDER}]:"
    body: Node = "fabric.backward(call())"
    if scene.layout.splits and scene.chance(0.3):
        body = ("with torch.no_grad():", ("call()",))
    return [(DIFFER, ((head, (body,)),))]


def made_otherwise(scene: Scene, line: str) -> str:
    """An optimizer that is of another class on rank 1, or has another learning rate there."""
    scene.drifts = True
    call = line.partition(" = ")[2]
    other = "torch.optim.Adagrad(" if "SGD" in call else "torch.optim.SGD("
    held = call.partition("(")[2].rpartition(", lr=")[0]
    if scene.chance(0.5):
        other = call.partition("(")[0] + "("
    return f"{line} if fabric.global_rank != 1 else {other}{held}, lr=0.2)  {DIFFER}"
