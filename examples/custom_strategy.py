"""Your own strategy: DDP that sends gradients in bfloat16, half the bytes; registered, and used by its name.

A strategy is a recipe. A subclass overrides the one step that differs; everything else (launching,
collectives, loaders, checkpoints, precision) is inherited. The name then works wherever `strategy=` is read:

    python examples/custom_strategy.py --devices 2
    python examples/custom_strategy.py --devices 2 --strategy ddp      # plain DDP, to compare
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fabric import Fabric
from fabric.strategies import STRATEGY_REGISTRY, DDPStrategy


class Bfloat16GradientsStrategy(DDPStrategy):
    """DDP whose gradients travel in bfloat16. Parameters, optimizer states and gradients stay in float32."""

    def setup_module(self, module):
        """DDP around the module, with a hook in place of its all_reduce. All ranks must call this."""
        wrapped = super().setup_module(module)
        if isinstance(
            wrapped, DistributedDataParallel
        ):  # a module without trainable parameters is not wrapped
            wrapped.register_comm_hook(state=None, hook=average_in_bfloat16)
        return wrapped


def average_in_bfloat16(state, bucket):
    """DDP communication hook: a future of the bucket's gradients, averaged over ranks.

    Source: torch.distributed.algorithms.ddp_comm_hooks (torch docs); its own bfloat16 hook needs NCCL.
    """
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda future: gradients.copy_(future.value()[0]))


STRATEGY_REGISTRY.register("ddp_bf16_gradients", Bfloat16GradientsStrategy, "DDP, gradients sent in bfloat16")


def train(fabric, args):
    """The work of every rank. Returns the last epoch's mean loss, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(data, batch_size=args.batch_size // fabric.world_size, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)

    bar = tqdm(
        range(args.epochs), desc="epochs", leave=False, disable=None if fabric.is_global_zero else True
    )
    for _ in bar:
        sums = {"loss": torch.zeros((), device=fabric.device), "right": torch.zeros((), device=fabric.device)}
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            fabric.backward(loss)
            optimizer.step()
            sums["loss"] += loss.detach() / len(loader)
            sums["right"] += (logits.argmax(1) == labels).float().mean() / len(loader)
        means = {name: value.item() for name, value in fabric.all_reduce(sums).items()}
    fabric.print(
        f"custom_strategy: {fabric.world_size} process(es), {type(fabric.strategy).__name__}, "
        f"loss {means['loss']:.6f}, accuracy while training {means['right']:.6f}"
    )
    return means


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="A strategy of your own, by name.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="ddp_bf16_gradients")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
