"""What the steps of `forms.py` call, and their models. Failing programs carry the text of what they use."""

from __future__ import annotations

from queue import Queue
from threading import Thread

import torch
from oracle import ROWS, Plain, place
from torch import nn


class Sparse(nn.Module):
    """Words in; gradients of the embedding have the rows of these words alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.embedding(x)))


def labels(fabric, seed, spread):
    """A joined batch (12,) of classes; -100 is no label: "none", one in each part ("even"), or "uneven"."""
    y = torch.randint(0, 4, (ROWS,), generator=torch.Generator().manual_seed(seed))
    y = y.sort().values  # so that the sums of class weights of parts differ
    count = fabric.replicas if isinstance(fabric, Plain) else place(fabric)[1]
    for rank, part in enumerate(y.chunk(count)):
        left_out = {"none": 0, "even": 1, "uneven": min(rank, len(part) - 1)}[spread]
        part[len(part) - left_out :] = -100
    return y


def local_gradients(fabric, held, local):
    """Says in the oracle whether the loop has left gradients as each rank has them."""
    if isinstance(fabric, Plain):
        fabric.local |= dict.fromkeys(held, local)


def compiled_step(fabric, step):
    """A whole step, compiled."""
    if isinstance(fabric, Plain):
        return step
    torch._dynamo.reset()
    return torch.compile(step, backend="eager")


class Slow(torch.optim.SGD):
    """Every second step ends halfway to slow copies of the parameters, in a list of the optimizer's own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        if self.count % 2 == 0:
            held = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(held, self.slow, strict=False):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


def ahead(loader):
    """The batches of a loader, which a thread reads ahead."""
    batches = Queue(2)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    reader = Thread(target=read, daemon=True)
    reader.start()
    yield from iter(batches.get, None)
    reader.join()
