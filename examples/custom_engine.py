"""Your own engine: it keeps the gradients itself, sends them in one message, and steps from its own buffer.

A layout says how a model sits on ranks, and what follows for backward, accumulation, clipping, normalising
and steps. Where an engine does these itself (as DeepSpeed does), its layout hands each over. Here all
gradients of a model are one flat tensor, and `.grad` is always None, but in a step:

    python examples/custom_engine.py --devices 2
    python examples/custom_engine.py --devices 1        # the same loss
"""

import argparse
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.traits import Traits
from fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy
from fabric.strategies.layout import Layout


class Engine:
    """All gradients of one model, flat: `own`, not sent yet, and `mean`, of all ranks."""

    def __init__(self, module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.own = torch.cat([torch.zeros_like(p).flatten() for p in self.parameters])
        self.mean = self.own.clone()
        self.parts = self.mean.split([p.numel() for p in self.parameters])
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def take(self, send):
        """Take in what a backward has left in `.grad`, and send it with what was kept before."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.own += torch.cat([grad.flatten() for grad in grads])
        for p in self.parameters:
            p.grad = None
        if send:
            dist.all_reduce(self.own.div_(dist.get_world_size()))
            self.mean += self.own
            self.own.zero_()


class FlatGradients(Layout):
    """The layout: models with an engine each."""

    traits = Traits(
        needs_launch=True,
        owns_backward=True,
        data_parallel=True,
        precisions=("64-true", "32-true", "bf16-mixed"),
        precisions_why="a loss scaler looks for gradients in .grad",
    )

    def __init__(self):
        self.engines, self.send = [], True

    def wrap(self, module, topology):
        self.engines.append(Engine(module))
        module.zero_grad = partial(self.drop, self.engines[-1:])
        return module

    def setup_optimizer(self, optimizer):
        engines = self.of([p for group in optimizer.param_groups for p in group["params"]])
        optimizer.zero_grad = partial(self.drop, engines)
        return optimizer

    def of(self, parameters):
        held = {id(p) for p in parameters}
        return [engine for engine in self.engines if held & {id(p) for p in engine.parameters}]

    def drop(self, engines, set_to_none=True):
        for flat in (flat for engine in engines for flat in (engine.own, engine.mean)):
            flat.zero_()

    @contextmanager
    def no_sync(self, wrapped):
        self.send = False
        try:
            yield
        finally:
            self.send = True

    def backward(self, run, tensor, *args, **kwargs):
        run(tensor, *args, **kwargs)
        for engine in self.engines:
            engine.take(self.send)

    def total_norm(self, parameters, norm_type):
        flat = [engine.mean for engine in self.of(parameters)]
        return flat, torch.nn.utils.get_total_norm(flat, norm_type)

    def clip_value(self, parameters, clip_value):
        for engine in self.of(parameters):
            engine.mean.clamp_(-clip_value, clip_value)

    def divide_gradients(self, parameters, divisor):
        for engine in self.of(parameters):
            engine.mean /= divisor


class FlatGradientsStrategy(ParallelStrategy):
    """The recipe: ranks as usual, that layout, and steps from the engine's buffer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layout = FlatGradients()

    def optimizer_step(self, optimizer, closure=None, **kwargs):
        """A step with the engine's gradients, which a closure makes as often as the optimizer calls it."""
        engines = self.layout.of([p for group in optimizer.param_groups for p in group["params"]])

        def put(there):
            for engine in engines:
                for parameter, part in zip(engine.parameters, engine.parts, strict=True):
                    parameter.grad = part.view_as(parameter) if there else None

        def made():
            put(False)  # a backward takes in what it finds there
            loss = closure()
            put(True)
            return loss

        put(True)
        result = super().optimizer_step(optimizer, **kwargs | ({"closure": made} if closure else {}))
        put(False)
        return result


STRATEGY_REGISTRY.register("flat_gradients", FlatGradientsStrategy, "gradients of an engine of its own")


def train(fabric, args):
    """The work of every rank, as under any other strategy. Returns the last epoch's mean loss."""
    from sklearn.datasets import load_digits

    fabric.seed_everything(0, verbose=False)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = DataLoader(data, batch_size=64 // fabric.world_size, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(args.epochs):
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            total += loss.detach() / len(loader)
    mean = fabric.all_reduce(total).item()
    fabric.print(f"custom_engine: {fabric.world_size} process(es), {args.strategy}, loss {mean:.6f}")
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An engine of your own behind the same loop.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="flat_gradients")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    Fabric(accelerator=args.accelerator, strategy=args.strategy, devices=args.devices).launch(train, args)
