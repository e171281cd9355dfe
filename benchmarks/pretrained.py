"""Peaks of memory of writing and reading files of Hugging Face, a Llama of 136 MB split over 2 ranks (Linux).

`make test-ecosystem` makes the environment that this runs in.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from checkpoint import most_of
from harness import child, on_a_rank, ranks, report, show, table
from memory import MALLOC, MIB

if TYPE_CHECKING:
    from harness import Table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "examples" / "README.md"
PYTHON = ROOT / ".venv-engines" / "huggingface" / "bin" / "python"
FILE = "16MB"
"""Of `max_shard_size`: the largest tensor, an embedding, has 16.8 MB."""
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LARGE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}


def config(sizes: dict[str, int]) -> Any:
    """Of a Llama with random weights."""
    from transformers import LlamaConfig

    return LlamaConfig(**sizes, **HEADS)


def whole(fabric: Any, model: Any, folder: Path) -> None:
    """Its own way, on rank zero."""
    with fabric.whole(model) as plain:
        if plain is not None:
            plain.save_pretrained(folder, max_shard_size=FILE)


def one_file(fabric: Any, model: Any, folder: Path) -> None:
    """The first row of the page."""
    fabric.save(folder / "model.safetensors", {"model": model})


def files(fabric: Any, model: Any, folder: Path) -> None:
    """The block of the page, as it stands there but for the size."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "max_shard_size" in block]
    names = {"fabric": fabric, "model": model, "folder": folder, "Path": Path}
    exec(code.replace("5GB", FILE), names)


def parts(fabric: Any, model: Any, folder: Path) -> None:
    """Each rank its part; `consolidate` makes a file of it."""
    fabric.save(folder / "parts", {"model": model})


SAVES = {
    "`save_pretrained` in `fabric.whole`": whole,
    "`fabric.save`, one file": one_file,
    f"`fabric.save`, files of {FILE}": files,
    "`fabric.save`, a directory of parts": parts,
}


def pretrained(fabric: Any, sizes: dict[str, int], folder: Path) -> None:
    """The whole model on each rank, then split."""
    from transformers import LlamaForCausalLM

    fabric.setup(LlamaForCausalLM.from_pretrained(folder))


def local_shard(fabric: Any, sizes: dict[str, int], folder: Path) -> None:
    """The row of the page: made without memory, then each rank reads its part."""
    from transformers import LlamaForCausalLM

    with fabric.init_module(empty_init=True):
        model = LlamaForCausalLM(config(sizes))
    model = fabric.setup(model)
    fabric.load(folder, {"model": model})


LOADS = {
    "`from_pretrained`, then setup": pretrained,
    "`init_module(empty_init=True)`, setup, `fabric.load`": local_shard,
}


def on_rank(name: str, folder: str) -> list[dict[str, float]]:
    """The most that each rank takes, over what was there; all code is loaded by a small model."""
    from transformers import LlamaForCausalLM

    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zero3")
    fabric.launch()
    most: dict[str, float] = {}
    for sizes in (SMALL, LARGE):
        place = Path(folder, str(sizes["hidden_size"]))
        fabric.barrier()
        if name in LOADS:
            most = most_of(partial(LOADS[name], fabric, sizes, place))
            continue
        model = fabric.setup(LlamaForCausalLM(config(sizes)))
        if fabric.is_global_zero:
            model.config.save_pretrained(place)
        fabric.barrier()
        most = most_of(partial(SAVES[name], fabric, model, place))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, most)
    return found


def consolidated(folder: str) -> dict[str, float]:
    """Without ranks."""
    from fabric.cli import main as cli

    most = {}
    for place in (Path(folder, str(sizes["hidden_size"])) for sizes in (SMALL, LARGE)):
        command = ["consolidate", str(place / "parts"), "--output", str(place / "model.safetensors")]
        most = most_of(partial(cli, command))
    return most


def size() -> float:
    """MiB of the model."""
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(config(LARGE))
    return sum([p.nbytes for p in model.parameters()]) / MIB


def measured() -> Table:
    """All ways, each in processes of its own."""
    rows, whole_size = [], child([__file__, "size"], python=str(PYTHON))
    settings: dict[str, Any] = {"python": str(PYTHON), "OMP_NUM_THREADS": "1", **MALLOC}

    def row(name: str, found: list[dict[str, float]]) -> None:
        alone = ["-"] * (2 - len(found))
        cells = [[*[f"{m[kind]:.0f}" for m in found], *alone] for kind in ("anonymous", "whole")]
        rows.append([name, *cells[0], *cells[1]])

    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(SAVES):
            row(name, ranks([__file__, name, f"{folder}/{number}"], **settings))
        row("`fabric consolidate`, no ranks", [child([__file__, "consolidate", f"{folder}/3"], **settings)])
        for name in LOADS:
            row(name, ranks([__file__, name, f"{folder}/2"], **settings))
    head = ["", "rank 0, anonymous", "rank 1, anonymous", "rank 0, with mapped files", "rank 1"]
    note = (
        f"MiB over what was there before: for what loads, with the model that it makes. The model is "
        f"{whole_size:.0f} MiB, a rank's part half of that."
    )
    return table("Peaks of resident memory, zero3 on 2 ranks", head, rows, note)


def main() -> None:
    warnings.simplefilter("ignore")
    if not sys.argv[1:]:
        show([measured()])
    elif sys.argv[1] == "size":
        report(size())
    elif sys.argv[1] == "consolidate":
        report(consolidated(sys.argv[2]))
    else:
        on_a_rank(lambda: on_rank(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    main()
