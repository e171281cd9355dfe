"""Forms of steps that went wrong without an error once: one table, of which each program has one row.

A row is the text of a step in a loop. `Form` says what its text may name; `kinds.py` makes programs of it.
Where numbers differ from one process the row is `warned`: the package must warn, and of others it must not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARED = r"pipeline|tensor|context"
"""Layouts in which several ranks get the same rows."""
SEQUENCES = r"context"
"""Layouts that cut rows into parts of sequences."""
SCALED = SEQUENCES + r"|scaled"
"""And those whose steps divide gradients by a loss scale, which gradients made by hand do not have."""


@dataclass(frozen=True)
class Form:
    """`$m`: a model, `$o`: its optimizer, `$x`: a new batch, `$seed`: its seed; other names: `choices`."""

    kind: str
    step: str
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    once: str = ""
    """What is said before the loop."""
    warned: bool = False
    """Whether ranks differ from one process, so that a warning is owed."""
    refused: bool = False
    """Whether ranks come to differ, so that an error is owed."""
    without: str = SEQUENCES
    """A pattern of layouts in which it means something else."""
    models: tuple[str, ...] = ()
    """The models that it is about; none named: all from (rows, 4) to (rows, 4)."""
    loops: bool = False
    """Whether it is a loop of its own."""


LABELLED = """
$o.zero_grad()
x = $x
y = share(fabric, labels(fabric, $seed + 100 * step, '$spread'))
out, kept = $m(x), y != -100
losses = nn.functional.cross_entropy(out, y, reduction='none')
loss = $loss
fabric.backward(loss)
$o.step()
"""
NORMALISED = LABELLED.replace("$o.step()", "fabric.normalize_gradients($m, kept.sum())\n$o.step()")
ACCUMULATED = """
$o.zero_grad()
count = 0
for part in range(2):
    x = share(fabric, floats($seed + 100 * step + 1000 * part))
    y = share(fabric, labels(fabric, $seed + 100 * step + 1000 * part, '$spread'))
    with fabric.no_backward_sync($m, enabled=part < 1):
        fabric.backward(nn.functional.cross_entropy($m(x), y, reduction='sum'))
    count += (y != -100).sum()
fabric.normalize_gradients($m, count)
$o.step()
"""
ROWS = "x[kept].sigmoid()"
MEANS = (
    "nn.functional.cross_entropy(out, y)",
    "nn.CrossEntropyLoss(label_smoothing=0.1)(out, y)",
    "nn.functional.nll_loss(out.log_softmax(1), y)",
    "0.5 * nn.functional.cross_entropy(out, y) + 0.1 * out.square().mean()",
    "(nn.functional.cross_entropy(out, y) - 0.1) / 2",
    "(losses * kept).sum() / kept.sum()",
    "losses.sum() / int(kept.sum())",
    "losses.sum() / kept.sum().clamp(min=1)",
    "(losses * kept / kept.sum()).sum()",
    "losses[kept].mean()",
    "losses.masked_select(kept).mean()",
    "losses.where(kept, torch.nan).nanmean()",
    "torch.dot(losses, kept.to(losses)) / kept.sum()",
    f"nn.functional.l1_loss(out[kept], {ROWS})",
    f"nn.functional.mse_loss(out[kept], {ROWS})",
    f"nn.functional.huber_loss(out[kept], {ROWS})",
    f"nn.functional.smooth_l1_loss(out[kept], {ROWS})",
    f"nn.functional.binary_cross_entropy(out[kept].sigmoid(), {ROWS})",
    f"nn.functional.binary_cross_entropy_with_logits(out[kept], {ROWS})",
    f"nn.functional.kl_div(out[kept].log_softmax(1), {ROWS}, reduction='batchmean')",
    "nn.functional.multi_margin_loss(out[kept], y[kept])",
    "nn.functional.soft_margin_loss(out[kept], x[kept].sign())",
)
WEIGHTED = ("nn.functional.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(out))",)
SUMS = ("losses.sum()", "nn.functional.cross_entropy(out, y, reduction='sum')", "(losses * kept).sum()")
EVERYWHERE = "(fabric.all_reduce(kept.sum().to(out), reduce_op='sum') / parts(fabric))"
OF_ALL = (f"losses.sum() / {EVERYWHERE}", f"nn.functional.cross_entropy(out, y) * kept.sum() / {EVERYWHERE}")

STATISTIC = """
$o.zero_grad()
out = torch.tanh($m($x))
found = fabric.all_reduce($what)
fabric.backward($loss)
$o.step()
"""
MOMENTS = ("out.T @ out, reduce_op='sum'$how", "out.sum(0), reduce_op='sum'$how")
OF_MOMENTS = ("(found - 1).square().sum() / 50", "(out - found / 12).square().mean()", "found.sin().sum()")
MEAN = ("out.mean(0)$how", "out.square().mean(0)$how")
OF_MEAN = ("(out - found).square().mean()", "(out * found).sin().mean()")
SUM = ("out.square().sum(), reduce_op='sum'$how", "out.sin().sum(), reduce_op='sum'$how")
OF_SUM = ("(found / 12 - 1).square()", "out.square().mean() * found.sin()", "(found / 12).exp()")
LOGGED = """
$o.zero_grad()
out = $m($x)
loss = out.square().mean()
$log
fabric.backward(loss)
$o.step()
"""

BY_HAND = """
$o.zero_grad()
$first
held = [p for p in $m.parameters() if p.requires_grad]
loss = score($m($x))
found = $grad
$average
for p, g in zip(held, found):
    if g is not None:
        $keep
local_gradients(fabric, held, $local)
$clip
$o.step()
"""
GRADS = {
    "first": ("pass", "fabric.backward(score($m($x)))", "fabric.backward(score($m($x)))\n$o.zero_grad()"),
    "grad": (
        "list(torch.autograd.grad(loss, held))",
        "list(torch.autograd.grad([loss], iter(held)))",
        "list(torch.autograd.grad(loss, dict(enumerate(held))).values())",
        "list(grad(loss, held, allow_unused=True))",
        "list(grad(loss, held))",
        "list(grad(outputs=loss, inputs=held))",
        "list(grad(loss, dict(enumerate(held))).values())",
    ),
    "keep": ("p.grad = g", "p.grad = g", "p.grad = g.clone()", "p.grad = 0.5 * g"),
    "clip": ("pass", "pass", "fabric.clip_gradients($m, $o, max_norm=0.1)"),
}
AVERAGES = (
    "found = fabric.all_reduce(found)",
    "found = [None if g is None else fabric.all_reduce(g) for g in found]",
)

AFTER_A_BACKWARD = {"first": GRADS["first"][1:], "average": ("pass",), "local": ("True",)}

COMPILED = """
def advance(x):
    $o.zero_grad()
    loss = $loss
    fabric.backward(loss)
    $clip
    $o.step()
    return loss.detach()
advance = compiled_step(fabric, advance)
"""
TERMS = """
$o.zero_grad()
out = $m($x)
loss = $loss
$more
fabric.backward(loss)
$o.step()
"""
OWN_TERM = """
if place(fabric)[0] == 0:
    loss = loss + 0.1 * parts(fabric) * $term
"""

STEP = """
$o.zero_grad()
fabric.backward(score($m($x)))
$o.step()
"""
LATER = "if step == $when:\n    "
ADDED = LATER + "$o.add_param_group({'params': held[:-2], 'lr': 0.05})\n" + STEP
THAWED = LATER + "for p in held[:-2]:\n        p.requires_grad_(True)\n" + STEP
HEAD = """
held = list($m.parameters())
$o = fabric.setup_optimizers(torch.optim.$class(held[-2:], lr=0.1))
"""
FROZEN = """
held = list($m.parameters())
for p in held[:-2]:
    p.requires_grad_(False)
"""
GROWN = """
grown = mlp()
for p in list(grown.parameters())[:2]:
    p.requires_grad_(False)
tuned = torch.optim.$class($held, lr=0.05)
grown, tuned = fabric.setup(grown, tuned)
"""
GROWS = """
tuned.zero_grad()
if step == $when:
    for p in list(grown.parameters())[:2]:
        p.requires_grad_(True)
    $add
fabric.backward(score(grown($x)))
tuned.step()
note.same('grown', grown.state_dict())
"""
ALL, SOME = "grown.parameters()", "list(grown.parameters())[2:]"
MORE = "tuned.add_param_group({'params': list(grown.parameters())[:2], 'lr': 0.01})"
SWITCHED = LATER + "$o = $setup(torch.optim.$class($m.parameters(), lr=0.05))\n" + STEP
CLASSES = {"class": ("SGD", "Adam"), "when": ("1", "2")}
SHUFFLED = {"shuffle": ("", ", shuffle=True", ", num_workers=2")}
ZIPPED = """
for step in range(2):
    for (ids, x), (others, z) in zip(first, second):
        note.seen('first', ids)
        note.seen('second', others)
        $o.zero_grad()
        fabric.backward(score($m(x)) + score($m(z)))
        $o.step()
"""
LOADERS = """
first = fabric.setup_dataloaders(DataLoader(Rows(36), batch_size=12 // parts(fabric)$shuffle))
second = fabric.setup_dataloaders(DataLoader(Rows(24), batch_size=12 // parts(fabric)$shuffle))
"""
SHORT = """
for step in range(2):
    for number, (ids, x) in enumerate(loader):
        last = number == len(loader) - 1
        with fabric.no_backward_sync($m, enabled=number % 2 == 0 and not last):
            fabric.backward(score($m(x)) / 2)
        note.seen('loader', ids)
        if number % 2 or last:
            $o.step()
            $o.zero_grad()
"""
LOADER = """
loader = DataLoader(Rows($rows), batch_size=24 // parts(fabric)$shuffle)
loader = fabric.setup_dataloaders(loader)
"""
ROWS_OF_LOADER = """
for step in range(2):
    for ids, x in loader:
        note.seen('loader', ids)
        $o.zero_grad()
        out = $m(x)
        fabric.backward($loss)
        $o.step()
"""
LOADER_OF_ROWS = """
loader = fabric.setup_dataloaders(DataLoader(Rows(36), batch_size=12 // parts(fabric)))
"""
BRANCHES = """
$o.zero_grad()
ways = ['left', 'right']
for part in range($parts):
    x = share(fabric, floats($seed + 100 * step + 1000 * part))
    fabric.backward(score($m(x, ways[(fabric.global_rank + part) % 2])))
$o.step()
"""
OWN_LIST = "$o = fabric.setup_optimizers(Slow($m.parameters(), lr=0.1))"
AHEAD = ROWS_OF_LOADER.replace("in loader", "in ahead(loader)").replace("$loss", "score(out)")
OWN = "torch.arange(len(out))"
JOINED = (
    "(out - 1).square().mean().sqrt()",
    "(out.mean(0) - 1).square().sum()",
    "nn.functional.mse_loss(out.mean(0), torch.ones(4).to(out))",
    "out.var(0).mean()",
    "(out - out.mean(0)).square().mean()",
    "(out - 1).norm() / 3",
    "out.square().mean() * out.sin().mean()",
    "out.square().sum() / (1 + out.abs().sum())",
    "out.softmax(0).square().sum()",
    "out.logsumexp(0).mean()",
    "(out - 1).square().mean(1).topk(2).values.mean()",
    f"nn.functional.cross_entropy(out @ out.T, {OWN})",
    f"nn.functional.cross_entropy(nn.functional.normalize(out) @ out.T, {OWN})",
    "(out.T @ out / len(out)).square().sum()",
    "torch.cdist(out, out).square().mean()",
    "torch.einsum('bi,ci->bc', out, out).sin().mean()",
    "(out[:, None] - out).square().exp().mean()",
    "nn.functional.cosine_similarity(out[:, None], out[None], dim=2).square().mean()",
)
OF_ROWS = (
    "(out - 1).square().mean(1).sqrt().mean()",
    "(out - 1).norm(dim=1).mean()",
    "(out - out.mean(1, keepdim=True)).square().mean()",
    "out.var(1).mean()",
    "(out[:, :, None] @ out[:, None]).sin().mean()",
    "(out[:, :, None] - out[:, None]).square().mean()",
    "torch.cdist(out[:, :, None], out[:, :, None]).square().mean()",
    "(out @ torch.ones(4, 12).to(out)).logsumexp(1).mean()",
    "out.T.softmax(0).square().mean()",
    "nn.functional.cosine_similarity(out, out.flip(1), dim=1).mean()",
    "sum([row.norm() for row in out]) / len(out)",
    "out.topk(2, dim=1).values.sin().mean() + out.logsumexp(1).mean()",
    "out.view(-1, 2).norm(dim=1).mean()",
    "out.square().mean() * 2 + out.sin().sum() / out.numel()",
)

TEACHER = "teacher = fabric.setup_module(nn.Linear(4, 4).requires_grad_(False))"
OF_METHOD = """
$o.zero_grad()
x = $x
y = share(fabric, labels(fabric, $seed + 100 * step, '$spread'))
found = teacher(x)
fabric.backward($m.labelled(x, y))
$o.step()
"""

FORMS = [
    Form("labels", LABELLED, {"loss": MEANS, "spread": ("uneven",)}, warned=True),
    Form("labels", LABELLED, {"loss": WEIGHTED, "spread": ("none", "uneven")}, warned=True),
    Form("labels", LABELLED, {"loss": MEANS, "spread": ("even", "none")}),
    Form("labels", NORMALISED, {"loss": SUMS, "spread": ("uneven", "even")}),
    Form("labels", ACCUMULATED, {"spread": ("uneven",)}),
    Form("labels", LABELLED, {"loss": OF_ALL, "spread": ("uneven",)}, without=SHARED),
    Form(
        "reduced", STATISTIC, {"what": MOMENTS, "loss": OF_MOMENTS, "how": ("",)}, warned=True, without=SHARED
    ),
    Form("reduced", STATISTIC, {"what": MEAN, "loss": OF_MEAN, "how": ("",)}, warned=True, without=SHARED),
    Form("reduced", STATISTIC, {"what": SUM, "loss": OF_SUM, "how": ("",)}, warned=True, without=SHARED),
    Form(
        "reduced",
        STATISTIC,
        {"what": MOMENTS, "loss": OF_MOMENTS, "how": (", sync_grads=True",)},
        without=SHARED,
    ),
    Form(
        "reduced", STATISTIC, {"what": MEAN, "loss": OF_MEAN, "how": (", sync_grads=True",)}, without=SHARED
    ),
    Form("reduced", STATISTIC, {"what": SUM, "loss": OF_SUM, "how": (", sync_grads=True",)}, without=SHARED),
    Form(
        "reduced",
        STATISTIC,
        {"what": MEAN, "loss": ("(found - 1).square().sum()",), "how": ("",)},
        without=SHARED,
    ),
    Form(
        "reduced",
        LOGGED,
        {
            "log": (
                "fabric.all_reduce(loss, reduce_op='sum')",
                "fabric.all_reduce(loss)",
                "fabric.all_reduce(out.detach().clone(), reduce_op='sum')",
                "fabric.all_reduce({'loss': loss.detach(), 'out': out.detach().square()}, reduce_op='max')",
            )
        },
    ),
    Form("grad", BY_HAND, {**GRADS, "average": AVERAGES, "local": ("False",)}, without=SCALED),
    Form("grad", BY_HAND, {**GRADS, "average": ("pass",), "local": ("True",)}, without=SCALED),
    Form("grad", BY_HAND, {**GRADS, **AFTER_A_BACKWARD}, without=SCALED),
    Form(
        "compiled",
        "x = $x\nnote.mean('loss', advance(x))",
        {
            "loss": ("score($m(x))", "$m(x).square().mean()"),
            "clip": (
                "pass",
                "fabric.clip_gradients($m, $o, max_norm=0.5)",
                "fabric.clip_gradients($m, $o, clip_val=0.1)",
            ),
        },
        once=COMPILED,
        models=("mlp", "deep", "twice"),
    ),
    Form("sparse", STEP, models=("sparse",)),
    Form(
        "terms",
        TERMS,
        {
            "loss": ("out.square().mean()", "(out - 1).abs().mean()"),
            "more": (
                "for turn in range(40):\n    loss = loss + 0.01 * loss",
                "for turn in range(40):\n    loss = 0.5 * (loss + loss)",
                "for turn in range(40):\n    loss = loss + 0.01 * out.square().mean()",
            ),
        },
    ),
    Form(
        "terms",
        TERMS,
        {
            "loss": (
                "out.square().mean()",
                "0.5 * out.square().mean() + out.sin().mean()",
                "out.square().sum() / 12 * parts(fabric)",
            ),
            "more": (OWN_TERM.strip(),),
            "term": ("out[:1].square().mean()", "out[0].sin().sum()", "out[:2].square().mean().sqrt()"),
        },
    ),
    Form("unfrozen", ADDED, CLASSES, once=HEAD),
    Form("unfrozen", THAWED, CLASSES, once=FROZEN),
    Form(
        "unfrozen",
        THAWED.replace("for p in", "$o.add_param_group({'params': held[:-2], 'lr': 0.05})\n    for p in"),
        CLASSES,
        once=HEAD + FROZEN,
    ),
    Form("unfrozen", GROWS, {**CLASSES, "held": (ALL,), "add": ("pass",)}, once=GROWN),
    Form("unfrozen", GROWS, {**CLASSES, "held": (SOME,), "add": (MORE,)}, once=GROWN),
    Form(
        "switched", SWITCHED, {**CLASSES, "setup": ("fabric.setup_optimizers", "fabric.setup_optimizers", "")}
    ),
    Form(
        "rows", ROWS_OF_LOADER, {"loss": JOINED}, once=LOADER_OF_ROWS, warned=True, loops=True, without=SHARED
    ),
    Form("rows", ROWS_OF_LOADER, {"loss": OF_ROWS}, once=LOADER_OF_ROWS, loops=True, without=SHARED),
    Form(
        "branches",
        BRANCHES,
        {"parts": ("1", "2", "4")},
        refused=True,
        without=r"^(?!fsdp|zero2|hsdp)|unused",
        models=("branch",),
    ),
    Form("lists", STEP, once=OWN_LIST),
    Form("methods", OF_METHOD, {"spread": ("uneven",)}, once=TEACHER, warned=True, models=("methods",)),
    Form("methods", OF_METHOD, {"spread": ("even", "none")}, once=TEACHER, models=("methods",)),
    Form("ahead", AHEAD, {**SHUFFLED, "rows": ("48", "72")}, once=LOADER, loops=True),
    Form(
        "ahead",
        ZIPPED.replace("zip(first, second)", "zip(ahead(first), ahead(second))"),
        SHUFFLED,
        once=LOADERS,
        loops=True,
    ),
    Form("batches", ZIPPED, SHUFFLED, once=LOADERS, loops=True),
    Form("batches", SHORT, {**SHUFFLED, "rows": ("36", "60")}, once=LOADER, loops=True),
    Form(
        "batches",
        SHORT,
        {**SHUFFLED, "rows": ("37", "61", "31")},
        once=LOADER,
        warned=True,
        loops=True,
        without=SHARED,
    ),
]
