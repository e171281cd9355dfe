"""Parts of a user's own: which hooks are called, in which order, and that the others cost nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, ConfigurationError
from fabric.core.parts import HOOKS, Part, composed, hooks_of
from fabric.strategies import DDPStrategy


class Recorder(Part):
    """Writes down the hooks that a strategy calls."""

    name = "recorder"

    def __init__(self):
        self.calls = []


def _recording(name):
    def hook(self, *args, **kwargs):
        self.calls.append(name)
        return getattr(Part, name)(self, *args, **kwargs)

    return hook


for _name in {*HOOKS} - {"facts", "differ", "around_pass", "after_nested_pass", "before_step", "before_clip"}:
    setattr(Recorder, _name, _recording(_name))


def loop(path: str, strategy: str) -> list[str]:
    part = Recorder()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[part])
    fabric.launch()
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)):
        fabric.backward(model(x).sum())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.normalize_gradients(model, 1)
    fabric.save(path, {"model": model})
    assert fabric.strategy.find_part("recorder") is part
    fabric.strategy.teardown()
    return part.calls


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_hooks_of_a_part_of_the_users(ranks, tmp_path, strategy):
    for calls in ranks.run(loop, str(tmp_path / "state.pt"), strategy, world_size=2):
        step = ["synchronised", "clipping", "stepping"]
        if strategy == "fsdp":  # which synchronises by the gradients of an optimizer
            step = ["clipping", "synchronised", "stepping"]
        begin = ["resolve", "join", "setup", "added", "epoch_begun"]
        assert calls == [*begin, *step, "epoch_ended", "normalizing", "saving", "teardown"]


class Facts(Part):
    def __init__(self, value: int):
        self.value = value

    def facts(self) -> bytes:
        return bytes([self.value]) * 16

    def differ(self, channel):
        raise ConfigurationError(f"this rank has the value {self.value}")


def with_facts(differ: bool) -> None:
    parts = [Facts(dist.get_rank() * differ), Facts(7)]
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=parts)
    fabric.launch()
    if differ:
        with pytest.raises(ConfigurationError, match=f"this rank has the value {fabric.global_rank}"):
            fabric.barrier()
    else:
        fabric.barrier()
        with pytest.raises(CollectiveMismatch):
            fabric.barrier("a" if fabric.global_rank else "b")


@pytest.mark.parametrize("differ", [False, True])
def test_facts_of_several_parts_are_compared_in_each_call(ranks, differ):
    ranks.run(with_facts, differ, world_size=3)


class Unimportant(Facts):
    """Its facts differ, and the difference means nothing."""

    def differ(self, channel):
        channel.check_barrier("explaining")


def with_a_difference_that_means_nothing() -> list[float]:
    part = Unimportant(dist.get_rank())
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=part)
    fabric.launch()
    return [fabric.all_reduce(torch.ones(()), reduce_op="sum").item() for _ in range(2)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_may_exchange_messages_to_explain_a_difference(ranks, world_size):
    found = ranks.run(with_a_difference_that_means_nothing, world_size=world_size)
    assert found == [[world_size, world_size]] * world_size


class Failing(Part):
    def failed(self, error, doing):
        raise ConfigurationError(f"in {doing}: {error}") from error


def test_a_part_may_replace_an_error_of_torch():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=Failing())
    with pytest.raises(ConfigurationError, match="in backward: element 0 of tensors does not require grad"):
        fabric.backward(torch.ones(()))


class Refusing(Part):
    def resolve(self, plan):
        raise ConfigurationError(f"not on {plan.num_nodes} machine")


def test_a_part_may_refuse_the_arguments():
    with pytest.raises(ConfigurationError, match="not on 1 machine"):
        Fabric(accelerator="cpu", strategy=DDPStrategy(), devices=1, plugins=[Refusing()])


class HalfOfTheData(Part):
    @property
    def data_rank(self):
        return (1, 2)


def test_a_part_may_decide_the_share_of_data():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=HalfOfTheData())
    assert fabric.strategy.data_rank == (1, 2)


def test_only_overridden_hooks_are_called():
    hooks = hooks_of([Part(), Failing(), Facts(1)])
    assert {name for name, calls in hooks.items() if calls} == {"failed", "facts", "differ"}
    assert composed(hooks["join"]) is None
    heard = []
    composed([heard.append, heard.append])(3)
    assert heard == [3, 3]
