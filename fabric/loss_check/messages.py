"""The warnings of the loss check; each is printed once, on rank zero."""

from __future__ import annotations

from typing import Any

from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning


def warn_of_weights(weights: list[float]) -> None:
    """Warn of a loss that divides by numbers that differ between ranks."""
    counts = ", ".join([f"{1 / weight:g} on rank {rank}" for rank, weight in enumerate(weights)])
    rank_zero_warn(
        f"The loss of a backward divides by {counts}, as a mean over the tokens or labels of each "
        "rank does (ignore_index, a mask, class weights). Gradients are averaged over ranks, so an item has "
        "more weight where there are fewer. Sum the losses of items, for example by "
        'cross_entropy(..., reduction="sum"), and write fabric.normalize_gradients(model, num_items) before '
        "each step; or divide by a number of all ranks.",
        category=RanksDifferWarning,
    )


def warn_of_sum(ranks: int) -> None:
    """Warn of a loss that is a sum over rows."""
    rank_zero_warn(
        f"The loss of the first backward is a sum over its items. Gradients are averaged over {ranks} ranks, "
        f"so they are 1/{ranks} of those of one process with the whole batch. Use a mean; or write "
        "fabric.normalize_gradients(model, num_items) before each step, also on one process; or multiply the "
        "loss by fabric.world_size.",
        category=RanksDifferWarning,
    )


def warn_of_nonlinear(kind: str) -> None:
    """Warn of a loss that is no mean over rows."""
    rank_zero_warn(
        f"The loss of a backward has {kind}, of this rank's rows. Gradients are averaged over ranks, and the "
        "mean of such losses of the parts is not the loss of the whole batch. Compute it per row and take "
        "the mean; or join the ranks first: mean = fabric.all_reduce(mean, sync_grads=True), or rows = "
        "fabric.all_gather(rows, sync_grads=True).flatten(0, 1).",
        category=RanksDifferWarning,
    )


def warn_of_same(name: str, ranks: int) -> None:
    """Warn that all ranks drew the same batches."""
    rank_zero_warn(
        f"All ranks called {name} with the same batches, so {ranks} ranks train on the data of one. For a "
        "loader write fabric.setup_dataloaders(loader). For batches that the loop draws, keep the rows "
        "batch[fabric.global_rank :: fabric.world_size], or write fabric.seed_everything(seed, "
        "per_rank=True) below the line that makes the model.",
        category=RanksDifferWarning,
    )


def warn_of_unequal(rows: list[int]) -> None:
    """Warn that ranks had unequal numbers of rows; `rows`: in rank order."""
    counts = ", ".join([f"{count} on rank {rank}" for rank, count in enumerate(rows)])
    rank_zero_warn(
        f"Ranks were given unequal numbers of rows: {counts}. Gradients are averaged over ranks, so a "
        "row of a smaller batch has more weight. Shard with fabric.setup_dataloaders(loader); or sum the "
        "losses of rows, and write fabric.normalize_gradients(model, num_rows) before each step.",
        category=RanksDifferWarning,
    )


def warn_of_last_batch(rows: int, strategy: Any) -> None:
    """Warn that the last global batch of an epoch, of `rows` rows, did not divide by the ranks."""
    shards = strategy.distributed_sampler_kwargs["num_replicas"]
    rank_zero_warn(
        f"The last batch of this epoch has {rows} rows, which {shards} ranks cannot share equally: some "
        "ranks had a row less, or a row twice (shuffled loaders). So the mean of their losses is not the "
        "mean over the batch, as one process computes it. Write DataLoader(..., drop_last=True), or choose "
        "a batch_size or a dataset that divides. To accept it without this warning, write "
        'fabric.setup_dataloaders(loader, uneven="exact"), or uneven="pad" to repeat rows.',
        category=RanksDifferWarning,
    )
