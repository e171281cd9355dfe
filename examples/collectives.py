"""A loop without a model or an optimizer: k-means over all processes, written with collectives.

Shows `broadcast` of a config, `rank_zero_first` for a file that one rank makes and all read, `all_reduce`
of a dictionary (one message, however many entries), `all_gather` of predictions, and `barrier`.

    python examples/collectives.py --devices 2
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from tqdm import tqdm

from fabric import Fabric

IMAGES = 1792
"""Of 1,797: a number that 1, 2, 4, 7 and 8 processes share evenly, since all_gather wants equal shapes."""


def work(fabric, args):
    """The work of every rank. Returns the mean squared distance and the purity, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    if IMAGES % fabric.world_size:
        raise ValueError(
            f"{IMAGES} images do not divide by {fabric.world_size} processes. Write --devices 2, 4 or 8."
        )

    # Any object: rank zero decides, all ranks get it. Tensors inside travel as tensors, never pickled.
    config = None
    if fabric.is_global_zero:
        config = {"clusters": args.clusters, "rounds": args.rounds, "folder": tempfile.mkdtemp()}
    config = fabric.broadcast(config)

    # Rank zero makes the file, the others enter the block when it is there. If it fails, all ranks raise.
    file = Path(config["folder"]) / "digits.pt"
    with fabric.rank_zero_first():
        if not file.exists():
            digits = load_digits()
            torch.save({"x": torch.tensor(digits.data / 16), "y": torch.tensor(digits.target)}, file)
    data = torch.load(file, weights_only=True)
    x, y = data["x"][:IMAGES].to(fabric.device), data["y"][:IMAGES]

    # Rank zero's first centres on all ranks; every rank then keeps its own part of the images.
    first = x[torch.randperm(IMAGES)[: config["clusters"]]]
    centres = fabric.broadcast(first)
    mine = x[fabric.global_rank :: fabric.world_size]

    bar = tqdm(
        range(config["rounds"]), desc="rounds", leave=False, disable=None if fabric.is_global_zero else True
    )
    for _ in bar:
        distances = torch.cdist(mine, centres)
        nearest = distances.argmin(1)
        sums = {
            "points": torch.zeros_like(centres).index_add_(0, nearest, mine),
            "members": torch.bincount(nearest, minlength=len(centres)),
            "squares": distances.min(1).values.square().sum(),
        }
        sums = fabric.all_reduce(sums, reduce_op="sum")
        # An empty cluster keeps its centre.
        members = sums["members"].clamp(min=1).unsqueeze(1)
        centres = torch.where(sums["members"].unsqueeze(1) > 0, sums["points"] / members, centres)

    # (world_size, images per rank), on one process too. Rank r held every world-th image, starting at r.
    gathered = fabric.all_gather(nearest)
    predictions = gathered.T.reshape(-1).cpu()
    purity = sum(int(y[predictions == k].bincount().max()) for k in predictions.unique()) / IMAGES
    error = sums["squares"].item() / IMAGES

    fabric.barrier()  # nobody reads the file any more
    if fabric.is_global_zero:
        shutil.rmtree(config["folder"])
    fabric.print(
        f"collectives: {fabric.world_size} process(es), "
        f"mean squared distance {error:.6f}, purity {purity:.6f}"
    )
    return {"error": error, "purity": purity}


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="k-means over all processes.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(work, args)


if __name__ == "__main__":
    main()
