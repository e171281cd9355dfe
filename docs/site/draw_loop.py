"""Draw `docs/images/`: the same loop on one rank and on four, and the badges of the README.

    python docs/site/draw_loop.py

A test compares the files with what this draws.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "images"
BADGES = {"torch": "2.9 to 2.15", "python": "3.10 to 3.14", "licence": "Apache 2.0"}
WIDTH, HEIGHT = 860, 330
STEPS = ("model(x)", "fabric.backward(loss)", "optimizer.step()")
STYLE = """
  text { font: 14px sans-serif; fill: #1f2328 }
  .title { font-weight: bold; font-size: 15px }
  .code { font-family: monospace; font-size: 13px }
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #eef2ff; stroke: #4f5bd5 }
  .data { fill: #fff4d6; stroke: #b7791f }
  .line { stroke: #57606a; stroke-width: 1.5; fill: none }
  .sync { stroke: #c2410c; stroke-width: 2; stroke-dasharray: 5 3; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .page { fill: #0d1117; stroke: #30363d }
    .box { fill: #1d2342; stroke: #8b95ff }
    .data { fill: #3a2f12; stroke: #e3b341 }
    .line { stroke: #9198a1 }
    .sync { stroke: #ff9b5e }
  }
"""


def text(x, y, words, kind=""):
    """Words, centred at x."""
    return f'<text x="{x}" y="{y}" text-anchor="middle" class="{kind}">{words}</text>'


def box(x, y, width, height, words, kind="box", code="code"):
    """A box with words in it; x is its middle."""
    rect = f'<rect x="{x - width / 2:g}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'
    return rect + text(x, y + height // 2 + 5, words, code)


def arrow(x, top, bottom):
    """An arrow downwards."""
    return f'<path class="line" d="M{x} {top}V{bottom}m-4 -6l4 6l4 -6"/>'


def rank(x, width, rows, steps, name):
    """One rank: its rows of the batch, and the steps of the loop."""
    found = [text(x, 62, name), box(x, 74, width, 32, rows, "data", "")]
    for number, step in enumerate(steps):
        top = 128 + 50 * number
        found += [arrow(x, top - 22 if number == 0 else top - 18, top), box(x, top, width, 32, step)]
    return found


def drawing():
    """The text of the file."""
    short = ("model(x)", "backward", "step()")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="One loop on 1 rank and on 4 ranks: each of the four takes '
        f'16 of 64 rows, gradients are averaged in backward, and the losses are the same.">',
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="page"/>',
        text(150, 30, "devices=1", "title"),
        *rank(150, 200, "64 rows", STEPS, "rank 0"),
        text(570, 30, "devices=4, the same loop", "title"),
    ]
    for number in range(4):
        lines += rank(375 + 130 * number, 110, "16 rows", short, f"rank {number}")
    lines += [
        *[f'<path class="sync" d="M{430 + 130 * n} 194H{450 + 130 * n}"/>' for n in range(3)],
        text(570, 290, "dashed lines: gradients are averaged", ""),
        text(150, 310, "last loss 0.2950", "code"),
        text(570, 310, "last loss 0.2950", "code"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def badge(name, value):
    """A badge: a name in grey, its value in blue."""
    left, right = 8 * len(name) + 14, 7 * len(value) + 14
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{name}: {value}">',
        f'<rect width="{left + right}" height="20" rx="3" fill="#1f5fbf"/>',
        f'<path d="M3 0H{left}V20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#4a4f57"/>',
        '<g fill="#fff" font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<text x="{left / 2:g}" y="14">{name}</text><text x="{left + right / 2:g}" y="14">{value}</text>',
        "</g></svg>",
    ]) + "\n"  # fmt: skip


def images():
    """Each file's name and text."""
    return {"loop.svg": drawing(), **{f"{name}.svg": badge(name, value) for name, value in BADGES.items()}}


if __name__ == "__main__":
    for name, content in images().items():
        (FOLDER / name).write_text(content)
