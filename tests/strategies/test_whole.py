"""`fabric.whole`: a plain module on rank zero, equal to the model that plain torch trains; others go on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, UsageError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, PipelineStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.head, self.tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.by_name = {"head": self.head}
        self.calls = 0
        self.register_forward_hook(count_calls)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tied(self.by_name["head"](self.norm(x)))

    @torch.no_grad()
    def generate(self, x):
        return self(self(x))


def count_calls(module, args, out):
    module.calls += 1


class Chain(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block(), Block(), nn.Linear(4, 4))

    @torch.no_grad()
    def generate(self, x):
        return self(self(x))


def parallel(model, mesh):
    for block in (model[0], model[1]):
        parallelize_module(
            block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return fully_shard(model, mesh=mesh["data_parallel"])


STRATEGIES = {
    "ddp": (Net, lambda: "ddp"),
    "zero1": (Net, lambda: "zero1"),
    "zero2": (Net, lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block})),
    "zero3": (Net, lambda: FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})),
    "offload": (Net, lambda: FSDPStrategy(auto_wrap_policy={Block}, cpu_offload=True)),
    "tensor parallel": (Chain, lambda: ModelParallelStrategy(parallel, 1, 2)),
    "pipeline": (Chain, lambda: PipelineStrategy(balance=[1, 2], num_microbatches=2)),
}


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, backward, step: int) -> None:
    optimizer.zero_grad()
    backward(model(rows(step)).pow(2).mean())
    optimizer.step()


def evaluated_alone(strategy: str) -> list[torch.Tensor]:
    make, choose = STRATEGIES[strategy]
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=choose())
    fabric.launch()
    model = fabric.setup_module(make())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    outs = []
    for step in range(3):
        train(model, optimizer, fabric.backward, step)
        with fabric.whole(model) as plain:
            assert (plain is not None) is fabric.is_global_zero
            if plain is not None:
                assert plain.training
                plain.eval()
                outs.append(plain.generate(rows(10)))
                outs += [value.clone() for value in plain.state_dict().values()]
                assert isinstance(plain, make)
                assert not any([hasattr(p, "device_mesh") for p in plain.parameters()])
                # transformers' generate looks for a mark, and would wait for the other ranks.
                assert not [name for part in plain.modules() for name in vars(part) if "fsdp" in name]
        assert model.training
        assert model.module.training
    return outs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_zero_evaluates_the_whole_model(ranks, strategy):
    make, _ = STRATEGIES[strategy]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(3):
        train(model, optimizer, torch.Tensor.backward, step)
        expected += [model.eval().generate(rows(10)), *[v.clone() for v in model.state_dict().values()]]
        model.train()
    first, second = ranks.run(evaluated_alone, strategy, world_size=2)
    assert second == []
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-4)


def refused(case: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(Net())
    if case == "not set up":
        with pytest.raises(UsageError, match=r"fabric\.whole needs a model that is set up, but got Net"):
            fabric.whole(Net()).__enter__()
    elif fabric.is_global_zero:
        with pytest.raises(CollectiveMismatch, match="whole"):
            fabric.whole(model).__enter__()
    else:
        with pytest.raises(CollectiveMismatch, match="whole"):
            fabric.barrier()


@pytest.mark.parametrize("case", ["not set up", "on rank zero only"])
def test_what_whole_refuses(ranks, case):
    ranks.run(refused, case, world_size=2)


class Exported:
    """What a user saves, made of the whole model while a save gathers."""

    def __init__(self, fabric, model) -> None:
        self.fabric, self.model = fabric, model

    def state_dict(self):
        with self.fabric.whole(self.model) as plain:
            return {} if plain is None else {"sum": plain.head.weight.detach().sum()}

    def load_state_dict(self, state) -> None:
        """Nothing is loaded."""


def save_of_whole(path: str) -> float:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.launch()
    model = fabric.setup(Net())
    fabric.save(path, {"export": Exported(fabric, model), "model": model}, format="full")
    return torch.load(path)["model"]["head.weight"].sum().item()


def test_a_whole_model_inside_of_a_save(ranks, tmp_path):
    first, second = ranks.run(save_of_whole, str(tmp_path / "x.pt"), world_size=2)
    assert first == second == pytest.approx(Net().head.weight.sum().item())
