"""The contract of all strategies: one function per promise. Every rank runs it; it raises if broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from fabric.checkpoint.torch_io import TorchCheckpointIO
from fabric.core.tree import flatten, iter_paths
from fabric.testing.subject import sgd, subject
from fabric.testing.worker import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabric.fabric import Fabric


class PromiseBroken(AssertionError):
    """A strategy violates a promise of the contract."""


def _must(condition: Any, message: str) -> None:
    if not condition:
        raise PromiseBroken(message)


def _equal(got: Any, expected: Any, what: str) -> None:
    """Raise `PromiseBroken` unless structures are equal and tensors close."""
    leaves, targets = dict(iter_paths(got)), dict(iter_paths(expected))
    same = flatten(got)[1] == flatten(expected)[1]
    _must(same, f"{what} has the entries {list(leaves)} in a {type(got).__name__} instead of {list(targets)}")
    for path, target in targets.items():
        leaf = leaves[path]
        if not isinstance(target, torch.Tensor):
            _must(leaf == target, f"{what}{path} is {leaf!r} instead of {target!r}")
            continue
        try:
            torch.testing.assert_close(leaf.detach().cpu(), target.detach().cpu())
        except AssertionError as error:
            reason = " ".join(str(error).split())
            raise PromiseBroken(f"{what}{path} differs from plain torch: {reason}") from None


def _setup(fabric: Fabric, net: torch.nn.Module) -> tuple[Any, Any]:
    """Return the model and an optimizer, set up in the order that the strategy requires."""
    if not fabric.strategy.traits.late_optimizers:
        model, optimizer = fabric.setup(net, sgd(net))
        return model, optimizer
    model = fabric.setup_module(net)
    return model, fabric.setup_optimizers(sgd(model))


def _batches(fabric: Fabric, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each step the joined batch, (shards * 3, 4), and this rank's three rows of it."""
    shard = fabric.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    rank = shard["rank"]
    steps_of_all = torch.randn(
        steps, shard["num_replicas"] * 3, 4, generator=torch.Generator().manual_seed(5)
    )
    return [(joined, joined[rank * 3 : rank * 3 + 3].to(fabric.device)) for joined in steps_of_all]


def _weights(fabric: Fabric, model: Any) -> dict[str, Any]:
    return {key: value.clone() for key, value in fabric.strategy.get_module_state_dict(model).items()}


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).pow(2).mean()
    return loss


def _train_plain(fabric: Fabric, steps: int, clip: dict[str, Any] | None = None) -> dict[str, Any]:
    net, optimizer = subject()
    for joined, _ in _batches(fabric, steps):
        optimizer.zero_grad()
        _loss(net, joined).backward()
        if clip and "max_norm" in clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip["max_norm"])
        elif clip:
            torch.nn.utils.clip_grad_value_(net.parameters(), clip["clip_val"])
        optimizer.step()
    return dict(net.state_dict())


def _train(fabric: Fabric, steps: int, clip: dict[str, Any] | None = None) -> tuple[Any, Any]:
    model, optimizer = _setup(fabric, subject()[0])
    for _, shard in _batches(fabric, steps):
        optimizer.zero_grad()
        fabric.backward(_loss(model, shard))
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
    return model, optimizer


def ranks_are_distinct(fabric: Fabric, folder: Path) -> None:
    """Check rank, world size and device of every rank."""
    info = rank_info()
    _must(fabric.world_size == info.world_size, f"world_size is {fabric.world_size}, not {info.world_size}")
    _must(fabric.global_rank == info.rank, f"global_rank is {fabric.global_rank}, not {info.rank}")
    _must(fabric.is_global_zero == (info.rank == 0), f"is_global_zero is {fabric.is_global_zero}")
    _must(torch.ones(1, device=fabric.device).item() == 1, "the root device does not work")
    sampler = fabric.strategy.distributed_sampler_kwargs
    if fabric.strategy.traits.data_parallel and sampler is not None:
        _must(0 <= sampler["rank"] < sampler["num_replicas"], f"distributed_sampler_kwargs are {sampler}")


def setup_keeps_the_model(fabric: Fabric, folder: Path) -> None:
    """Check that setup changes neither weights nor the classes of model and optimizer."""
    net, _ = subject()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    model, optimizer = _setup(fabric, net)
    _equal(_weights(fabric, model), before, "the model after setup")
    _must(isinstance(optimizer, torch.optim.SGD), "the optimizer is not an SGD after setup")
    devices = {p.device.type for p in model.parameters()} - {"meta"}  # meta: on other ranks
    expected = {"cpu"} if fabric.strategy.traits.late_optimizers else {fabric.device.type}  # cpu: offloaded
    _must(devices == expected, f"setup left parameters on {devices}")
    _must(model.module is net, "model.module is not the user's module")


def forward_equals_plain_torch(fabric: Fabric, folder: Path) -> None:
    """Check that forward equals that of the plain module, in training and under no_grad."""
    model, _ = _setup(fabric, subject()[0])
    plain = subject()[0]
    _, shard = _batches(fabric, 1)[0]
    expected = plain(shard.cpu())
    _equal(model(shard), expected, "the output")
    model.eval()
    with torch.no_grad():
        _equal(model(shard), expected, "the output under no_grad")


def training_equals_plain_torch(fabric: Fabric, folder: Path) -> None:
    """Check that steps on shards of batches give the weights of plain torch on the joined batches."""
    model, _ = _train(fabric, 3)
    _equal(_weights(fabric, model), _train_plain(fabric, 3), "the model after three steps")


def models_are_independent(fabric: Fabric, folder: Path) -> None:
    """Check that a backward and step of one model do not change another."""
    (first, first_optimizer), (second, _) = (_setup(fabric, subject()[0]) for _ in range(2))
    before = _weights(fabric, second)
    _, shard = _batches(fabric, 1)[0]
    fabric.backward(_loss(first, shard))
    first_optimizer.step()
    _equal(_weights(fabric, second), before, "the model that was not stepped")
    _equal(_weights(fabric, first), _train_plain(fabric, 1), "the model that was stepped")


def accumulation_equals_the_big_batch(fabric: Fabric, folder: Path) -> None:
    """Check that backwards inside no_backward_sync and one outside give the gradient of all micro-batches."""
    model, optimizer = _setup(fabric, subject()[0])
    batches = _batches(fabric, 3)
    for step, (_, shard) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=step < 2):
            fabric.backward(_loss(model, shard) / 3)
    optimizer.step()
    net, plain = subject()
    for joined, _ in batches:
        (_loss(net, joined) / 3).backward()
    plain.step()
    _equal(_weights(fabric, model), dict(net.state_dict()), "the model after three micro-batches")


def closures_equal_plain_torch(fabric: Fabric, folder: Path) -> None:
    """Check that steps with a closure give the same weights, and return the closure's loss."""
    model, optimizer = _setup(fabric, subject()[0])
    for _, shard in _batches(fabric, 2):

        def closure(shard: torch.Tensor = shard) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, shard)
            fabric.backward(loss)
            return loss

        _must(torch.is_tensor(optimizer.step(closure)), "step(closure) does not return a loss")
    _equal(_weights(fabric, model), _train_plain(fabric, 2), "the model after two steps by closure")


def normalizing_equals_the_joined_batch(fabric: Fabric, folder: Path) -> None:
    """Check normalize_gradients with different numbers of items on the ranks."""
    model, optimizer = _setup(fabric, subject()[0])
    net, plain = subject()
    shards = fabric.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    counts = [3 - rank % 2 for rank in range(shards["num_replicas"])]
    joined, shard = _batches(fabric, 1)[0]
    local_count = counts[shards["rank"]]
    fabric.backward(model(shard)[:local_count].pow(2).sum())
    items = fabric.normalize_gradients(model, num_items=local_count, optimizer=optimizer)
    _must(items == sum(counts), f"normalize_gradients counted {items} items, not {sum(counts)}")
    kept = torch.cat([joined[3 * rank : 3 * rank + count] for rank, count in enumerate(counts)])
    _loss(net, kept).backward()
    optimizer.step()
    plain.step()
    _equal(_weights(fabric, model), dict(net.state_dict()), "the model after a step by all items")


def clipping_sees_the_whole_gradient(fabric: Fabric, folder: Path) -> None:
    """Check that clipping by norm and by value equals plain torch on the joined batch; and the norm."""
    if fabric.strategy.traits.steps_locally:
        return
    for clip in ({"max_norm": 0.05}, {"clip_val": 0.01}):
        model, _ = _train(fabric, 2, clip)
        _equal(_weights(fabric, model), _train_plain(fabric, 2, clip), f"the model clipped with {clip}")
    net, _ = subject()
    joined, shard = _batches(fabric, 1)[0]
    _loss(net, joined).backward()
    expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    model, optimizer = _setup(fabric, subject()[0])
    fabric.backward(_loss(model, shard))
    _equal(fabric.clip_gradients(model, optimizer, max_norm=1e9), expected, "the returned norm")


def state_keys_are_the_users(fabric: Fabric, folder: Path) -> None:
    """Check that state dicts have the keys of the plain module and optimizer."""
    model, optimizer = _train(fabric, 1)
    keys, expected = list(fabric.strategy.get_module_state_dict(model)), list(subject()[0].state_dict())
    _must(keys == expected, f"the state dict has the keys {keys} instead of {expected}")
    state = fabric.strategy.get_optimizer_state(optimizer)
    _must({"state", "param_groups"} <= set(state), f"the optimizer state has the keys {list(state)}")


def checkpoints_round_trip(fabric: Fabric, folder: Path) -> None:
    """Check that load restores weights, the optimizer's momentum and plain data on every rank."""
    _round_trip(fabric, folder / "checkpoint", "full")


def sharded_checkpoints_round_trip(fabric: Fabric, folder: Path) -> None:
    """Check the same for sharded checkpoints, unless the strategy has its own CheckpointIO."""
    if type(fabric.strategy.checkpoint_io) is TorchCheckpointIO:
        _round_trip(fabric, folder / "checkpoint", "sharded")


def _round_trip(fabric: Fabric, path: Path, format: str) -> None:
    model, optimizer = _train(fabric, 2)
    saved = _weights(fabric, model)
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 7}, format=format)
    fabric.barrier()
    _must(path.is_dir() == (format == "sharded"), f"format={format!r} did not write {path}")
    loaded, loaded_optimizer = _setup(fabric, subject()[0])
    state = {"model": loaded, "optimizer": loaded_optimizer, "epoch": 0}
    fabric.load(path, state)
    _must(state["epoch"] == 7, f"the number 7 was loaded as {state['epoch']!r}")
    _equal(_weights(fabric, loaded), saved, "the model after loading")
    _, shard = _batches(fabric, 3)[2]
    for net, its_optimizer in ((model, optimizer), (loaded, loaded_optimizer)):
        its_optimizer.zero_grad()
        fabric.backward(_loss(net, shard))
        its_optimizer.step()
    _equal(_weights(fabric, loaded), _weights(fabric, model), "the model one step after loading")


def collectives_are_right(fabric: Fabric, folder: Path) -> None:
    """Check all collectives, on nested data."""
    rank, world, device = fabric.global_rank, fabric.world_size, fabric.device
    ones = torch.ones(2, device=device)
    tree = {"a": ones * rank, "b": [torch.tensor(rank + 1.0, device=device), (ones.double(),)]}
    mean = (world - 1) / 2
    expected = {"a": ones * mean, "b": [torch.tensor(mean + 1.0), (ones.double(),)]}
    _equal(fabric.all_reduce(tree, inplace=False), expected, "all_reduce(mean)")
    _equal(tree["a"], ones * rank, "the input of all_reduce(inplace=False)")
    summed = fabric.all_reduce(rank, reduce_op="sum")
    _equal(summed, torch.tensor(world * (world - 1) // 2), "all_reduce(sum) of a number")
    gathered = fabric.all_gather(ones * rank)
    _equal(gathered, torch.stack([torch.ones(2) * r for r in range(world)]), "all_gather")
    for src in range(world):
        sent = {"from": rank, "tensor": torch.full((3,), rank)}
        got = fabric.broadcast(sent if rank == src else None, src)
        _equal(got, {"from": src, "tensor": torch.full((3,), src)}, f"broadcast(src={src})")
    decide = fabric.strategy.reduce_boolean_decision
    _must(decide(True) and not decide(False), "reduce_boolean_decision is wrong for equal flags")
    _must(decide(rank == 0, all=False), "reduce_boolean_decision(all=False) ignores rank zero's True")
    _must(decide(rank == 0) == (world == 1), "reduce_boolean_decision(all=True) ignores a False")
    fabric.barrier("contract")
    parts = torch.arange(2.0 * world, device=device)
    _equal(fabric.scatter(parts), parts[2 * rank : 2 * rank + 2], "scatter")
    _equal(
        fabric.reduce_scatter(parts * rank, "sum"),
        parts[2 * rank : 2 * rank + 2] * mean * world,
        "reduce_scatter",
    )
    routed = torch.cat([parts[2 * rank : 2 * rank + 2] + r for r in range(world)])
    _equal(fabric.all_to_all(parts + rank), routed, "all_to_all")
    joined = torch.cat([torch.full((r + 1,), r) for r in range(world)])
    _equal(fabric.all_gather(joined[joined == rank], uneven="cat"), joined, "all_gather(uneven='cat')")
    _must((fabric.gather(rank) is None) == (rank != 0), "gather does not return the data on rank zero only")
    _equal(fabric.all_gather_object(str(rank)), [str(r) for r in range(world)], "all_gather_object")
    _must(fabric.any(rank == 0) and fabric.all(True), "any or all is wrong")
    _equal(fabric.agree({"epoch": 3}), {"epoch": 3}, "agree")


OVERRIDABLE = (
    "backward", "optimizer_step", "setup_module_and_optimizers", "all_reduce", "all_gather", "broadcast",
    "barrier", "save_checkpoint", "load_checkpoint", "clip_gradients_norm", "batch_to_device",
    "process_dataloader", "module_to_device",
)  # fmt: skip


def overrides_take_effect(fabric: Fabric, folder: Path) -> None:
    """Check that the verbs of Fabric call the methods that a subclass of the strategy overrides."""
    model, _ = _train(fabric, 1, {"max_norm": 1.0})
    fabric.all_reduce(1.0)
    fabric.all_gather(1.0)
    fabric.broadcast(1)
    fabric.barrier()
    fabric.to_device(torch.ones(1))
    fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4))))
    fabric.save(folder / "checkpoint", {"model": model})
    fabric.load(folder / "checkpoint", {"model": model})
    seen = set(fabric.strategy.seen)  # type: ignore[attr-defined]
    if fabric.strategy.traits.late_optimizers:
        seen.add("setup_module_and_optimizers")
    missed = [name for name in OVERRIDABLE if name not in seen]
    _must(not missed, f"an override of {', '.join(missed)} is not called")
    if not fabric.strategy.traits.steps_locally:
        _equal(
            _weights(fabric, model), _train_plain(fabric, 1, {"max_norm": 1.0}), "the model under overrides"
        )


def loaders_are_split(fabric: Fabric, folder: Path) -> None:
    """Check that set-up loaders yield every sample exactly once over all data shards, on the device."""
    data = torch.arange(12 * fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(data), batch_size=3))
    local = torch.cat([batch for (batch,) in loader])
    _must(local.device.type == fabric.device.type, f"batches are on {local.device}, not on {fabric.device}")
    kwargs = fabric.strategy.distributed_sampler_kwargs or {"num_replicas": 1}
    _must(len(local) * kwargs["num_replicas"] == len(data), f"a rank saw {len(local)} of {len(data)} samples")
    gathered = fabric.all_gather(local).flatten()
    counts = torch.bincount(gathered.cpu(), minlength=len(data))
    expected = fabric.world_size // kwargs["num_replicas"]
    _must(bool((counts == expected).all()), f"samples were seen {counts.tolist()} times, not {expected} each")


def teardown_can_be_repeated(fabric: Fabric, folder: Path) -> None:
    """Check that teardown works while models exist, and twice."""
    _train(fabric, 1)
    fabric.strategy.teardown()
    fabric.strategy.teardown()


PROMISES: tuple[Callable[[Fabric, Path], None], ...] = (
    ranks_are_distinct,
    setup_keeps_the_model,
    forward_equals_plain_torch,
    training_equals_plain_torch,
    models_are_independent,
    accumulation_equals_the_big_batch,
    closures_equal_plain_torch,
    normalizing_equals_the_joined_batch,
    clipping_sees_the_whole_gradient,
    state_keys_are_the_users,
    checkpoints_round_trip,
    sharded_checkpoints_round_trip,
    collectives_are_right,
    overrides_take_effect,
    loaders_are_split,
    teardown_can_be_repeated,
)
