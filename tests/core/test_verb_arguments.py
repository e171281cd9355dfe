"""Wrong arguments of each public method of `Fabric`: an error that names the method and its arguments."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, ConfigurationError, FabricError

VERBS = [
    name for name in dir(Fabric) if name[0] != "_" and callable(getattr(Fabric, name)) and name != "print"
]


def parameters(name):
    return list(inspect.signature(getattr(Fabric, name)).parameters.values())[1:]


@pytest.fixture(scope="module")
def fabric():
    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    return made


@pytest.mark.parametrize("name", VERBS)
def test_unknown_superfluous_and_missing_arguments(fabric, name):
    found = parameters(name)
    positional = [one for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [one.name for one in found if one.default is one.empty and "VAR" not in one.kind.name]
    kinds = {one.kind for one in found}
    calls = {}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        calls["there is no such argument"] = lambda: getattr(fabric, name)(no_such=1)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        many = [None] * (len(positional) + 1)
        calls["too many positional arguments"] = lambda: getattr(fabric, name)(*many)
    if required:
        calls[f"missing a required argument: '{required[0]}'"] = getattr(fabric, name)
    for text, call in calls.items():
        with pytest.raises(ArgumentTypeError, match=rf"^fabric\.{name}\b.*({text})"):
            call()


WRONG = {
    "all_reduce(x, 'sum')": 'is not a process group. Write fabric.all_reduce(data, reduce_op="sum")',
    "all_reduce(x, 'max')": 'reduce_op="max"',
    "all_reduce('sum', x)": "group=Tensor is not a process group. Write fabric.all_reduce(data, reduce_op=",
    "all_reduce(x, torch.distributed.ReduceOp.SUM)": "group=RedOpType is not a process group",
    "all_reduce(x, async_op='x')": "async_op='x' must be True or False",
    "all_gather(x, 0)": "group=0 is not a process group. Write fabric.all_gather(data), or group=torch.",
    "all_gather(x, None, model)": "sync_grads=Linear must be True or False",
    "broadcast(x, group=[0, 1])": "group=list is not a process group",
    "broadcast(x, model)": "broadcast(src=Linear)",
    "agree(model)": "got Linear, which was set up. Write fabric.check_replicas(model).",
    "barrier(model)": 'name=Linear is not a text. Write name="epoch 0".',
    "check_replicas('x')": "compares tensors, but str has none",
    "check_replicas(3)": "write fabric.agree(value)",
    "rank_zero_first(model)": "local=Linear must be True or False",
    "no_backward_sync(model, optimizer)": "enabled=SGD must be True or False",
    "no_backward_sync(optimizer)": "needs a model that is set up, but got SGD",
    "no_backward_sync(net=model)": "Write fabric.no_backward_sync(model, enabled=not last).",
    "normalize_gradients(model)": "missing a required argument: 'num_items'",
    "normalize_gradients(model, 8, optimizer=model)": "(model, num_items, optimizer=optimizer)",
    "normalize_gradients(model, 8, optimizer=[optimizer])": "with one optimizer",
    "normalize_gradients(model, tokens=8)": "It takes module, num_items, optimizer.",
    "init_module(model)": "empty_init=Linear must be True or False",
    "init_module(dtype=torch.half)": "Write `with fabric.init_module():` around Model(...).",
    "find_batch_size(step)": "missing a required argument: 'global_batch'",
    "find_batch_size(step, 8)": "too many positional arguments. Its arguments are fabric.find_",
    "find_batch_size(step, batch_size=8)": "Write start=8, the first size that is tried.",
    "profile(3)": 'needs a path, but got int. Write fabric.profile("trace").',
    "profile('trace', steps=3)": "Write active=3, the number of recorded steps.",
    "profile('trace', schedule=3)": "Write wait=1, warmup=1, active=3, the numbers of steps.",
    "profile('trace', with_stacks=True)": "Did you mean with_stack=?",
    "profile('trace', wait='x')": "wait=x, warmup=1, active=3. Give steps of 0 or more",
    "profile('trace', ranks=0)": "ranks=0, wait=1, warmup=1, active=3. Give steps of 0 or more",
    "progress(3)": "got int. Write fabric.progress(loader), or fabric.progress(range(steps)).",
    "progress(model)": "got Linear. Write fabric.progress(loader)",
    "progress([1], description='x')": 'Write desc="epoch 0".',
    "progress([1], leaf=True)": "Did you mean leave=?",
    "progress([1], model)": 'desc=Linear is not a text. Write desc="epoch 0".',
    "progress([1], show='no')": "show='no' must be True or False",
    "seed_everything(model)": "seed=Linear is not a seed",
    "seed_everything(3, 'x')": "workers='x' must be True or False",
    "seed_everything(3, per_rank='x')": "per_rank='x' must be True or False",
    "seed_everything(3, rank=1)": "Write fabric.seed_everything(seed, per_rank=True).",
    "save(None, {})": 'needs a path, but got NoneType. Write fabric.save(path, {"model": model}).',
    "save('a.pt', {}, wait='x')": "wait='x' must be True or False",
    "load(3)": 'needs a path, but got int. Write fabric.load(path, {"model": model}).',
    "load('a.pt', weights_only='x')": "weights_only='x' must be True or False",
    "load_latest({}, 'folder')": 'got dict. Write fabric.load_latest("checkpoints", {"model"',
    "load_latest('folder', model)": 'got Linear. Write fabric.load_latest("checkpoints", {',
    "load_latest('folder', None)": "needs a dictionary, but got NoneType",
    "save_latest({}, 'folder', step=1)": 'fabric.save_latest("checkpoints", {"model": model}, step=step).',
    "log('loss', 1.0, optimizer)": "step=SGD is not a number",
    "launch(model)": "needs a function, but got Linear. Write fabric.launch(train)",
    "setup_module(None)": "needs torch's Module, but got NoneType. Write fabric.setup_module(model).",
    "setup_module(plain, optimizer)": "fabric.setup_module: move_to_device=SGD must be True or False",
    "setup_module(plain, optimizer=optimizer)": "Write fabric.setup(model, optimizer).",
    "setup(None)": "got NoneType. Write fabric.setup(model, optimizer).",
    "setup_optimizers(None)": "got NoneType. Write for example torch.optim.Adam(model.parameters()).",
    "setup_dataloaders(None)": "got NoneType. Write fabric.setup_dataloaders(DataLoader(dataset",
    "setup_dataloaders(loader, shard_iterable='x')": "shard_iterable='x' must be True or False",
    "backward(loss, optimizer)": "got SGD as its second argument, which is the gradient of the first "
    "one, a tensor. Write fabric.backward(loss), and then optimizer.step() of each optimizer.",
    "backward(loss, model)": "Write fabric.backward(loss), which finds the model; or model=model",
    "backward(loss, True)": "got bool as its second argument",
    "backward(loss, optimizer=optimizer)": "Write fabric.backward(loss), and then optimizer.step().",
    "backward(loss, retain=True)": "Did you mean retain_graph=?",
    "backward(loss, model=optimizer)": "fabric.backward needs a model that is set up, but got SGD",
    "backward(optimizer)": "got SGD. Write fabric.backward(loss), and then optimizer.step().",
    "backward(optimizer, loss)": "got SGD. Write fabric.backward(loss), and then optimizer.step().",
    "backward(loss.item())": "got float. Write fabric.backward(loss) without .item().",
    "backward(out)": "got Out. Write fabric.backward(out.loss).",
    "backward(torch.nn.functional.mse_loss)": "Call it: fabric.backward(loss_function(output, target)).",
}


class Out:
    loss = torch.ones(())


@pytest.mark.parametrize("call", WRONG)
def test_arguments_of_wrong_kinds(fabric, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = nn.Linear(2, 2)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    x = torch.ones(2)
    names = {"torch": torch, "fabric": fabric, "x": x, "model": model, "optimizer": optimizer, "plain": plain}
    names |= {"loss": model(x).sum(), "out": Out(), "loader": DataLoader([1, 2]), "step": print}
    if call.startswith("profile"):
        call = f"{call}.__enter__()"
    with pytest.raises(FabricError, match=re.escape(WRONG[call.removesuffix(".__enter__()")])) as raised:
        eval(f"fabric.{call}", names)
    assert not re.search("FabricSGD|_FabricModule", str(raised.value))


@pytest.mark.filterwarnings("ignore:.*has no logger")
def test_arguments_that_are_right(fabric, monkeypatch):
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    model = fabric.setup(nn.Linear(2, 2))
    for enabled in (True, False, 3, 0, None, torch.tensor(True)):
        fabric.no_backward_sync(model, enabled=enabled)
    fabric.check_replicas(model, {"a": torch.ones(1), "b": 3}, [], {})
    fabric.barrier("epoch 0")
    fabric.seed_everything(1, workers=4, verbose=False)
    fabric.log("loss", 1.0, torch.tensor(3))
    fabric.backward(model(torch.ones(2)), torch.ones(2), True)
    with pytest.raises(ConfigurationError, match="the path is empty"):
        fabric.save("", {})
    assert list(fabric.progress([1, 2], "epoch", show=False, leave=False)) == [1, 2]


def group_of_one_rank():
    fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy="ddp")
    fabric.launch()
    group = torch.distributed.new_group([0])
    with pytest.raises(ArgumentTypeError, match=r"^fabric\.all_reduce: group='sum' is not a process group"):
        fabric.all_reduce(torch.ones(1), "sum")
    if fabric.global_rank == 0:
        return fabric.all_reduce(torch.ones(1), group, "sum").item()
    with pytest.raises(FabricError) as raised:
        fabric.all_reduce(torch.ones(1), group, "sum")
    return str(raised.value)


def test_a_group_is_accepted_and_a_reduction_in_its_place_is_not(ranks):
    one, text = ranks.run(group_of_one_rank, world_size=2)
    assert one == 1.0
    assert "is not a process group" not in text
