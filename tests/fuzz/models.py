"""The models of fuzzed programs, small and odd. A failing program carries the text of those that it uses."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from oracle import OnPurpose, clip_by_hand
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

armed_at: list[str] = []


@contextlib.contextmanager
def armed(where: str):
    """Inside, `Trap` raises OnPurpose in "forward" or "backward"."""
    armed_at.append(where)
    try:
        yield
    finally:
        armed_at.remove(where)


class _Springs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if "backward" in armed_at:
            raise OnPurpose("in backward")
        return grad


class Trap(nn.Module):
    """Passes x on, or raises where it is told to."""

    @torch.compiler.disable  # compiled it would know while it is traced where it is to raise
    def forward(self, x):
        if "forward" in armed_at:
            raise OnPurpose("in forward")
        return _Springs.apply(x) if x.requires_grad else x


class Block(nn.Module):
    """A residual block, of which FSDP makes a group."""

    def __init__(self, width=4):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), Trap(), nn.Tanh(), nn.Linear(8, 4))


def deep():
    return nn.Sequential(nn.Linear(4, 4), Block(), Trap(), Block(), nn.Linear(4, 4))


class Leaky(Block):
    """A block that ends in an operation which fills in backward what it needs: its numbers are drawn."""

    def forward(self, x):
        return nn.functional.rrelu(super().forward(x), 0.2, 0.2, training=self.training)


def leaky():
    return nn.Sequential(nn.Linear(4, 4), Leaky(), Trap(), nn.Linear(4, 4), nn.RReLU(0.3, 0.3))


class Twice(nn.Module):
    """A layer that is used twice, and a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.trap, self.scale = Trap(), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last(self.trap(self.inner(torch.tanh(self.inner(x))))) * self.scale


class Tied(nn.Module):
    """Words in, scores of words out; embedding and head share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.trap = nn.Embedding(10, 4), Block(), Trap()
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.block(self.trap(self.embedding(x))))


class Heads(nn.Module):
    """A shared trunk with two heads, by name."""

    def __init__(self):
        super().__init__()
        self.trunk, self.trap = nn.Linear(4, 8), Trap()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        h = self.trap(torch.tanh(self.trunk(x)))
        return {"left": self.left(h), "right": self.right(h)}


class Branch(nn.Module):
    """One of two ways, by a flag. Their layers have different sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.left = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))

    def forward(self, x, way="both"):
        h = torch.tanh(self.first(x))
        return {"left": lambda: self.left(h), "right": lambda: self.right(h)}.get(
            way, lambda: self.left(h) + self.right(h)
        )()


@dataclass
class Found:
    """An output."""

    scores: torch.Tensor
    extra: dict


class Records(nn.Module):
    """A dictionary in, a dataclass out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.trap = nn.Linear(4, 6), nn.Linear(6, 4), Trap()

    def forward(self, given):
        h = self.trap(torch.sin(self.a(given["x"]) * given.get("scale", 1.0)))
        return Found(self.b(h), {"hidden": h, "rows": len(h)})


class Pair(nn.Module):
    """A tuple in, a tuple out, by keyword too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair, *, gain=1.0):
        return torch.tanh(self.a(pair[0])) * gain, self.b(pair[1])


class Methods(nn.Module):
    """Ways through the model beside `forward`."""

    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.trap = Trap()

    def encode(self, x):
        return self.trap(torch.tanh(self.middle(torch.tanh(self.body(x)))))

    def forward(self, x):
        return self.head(self.encode(x))

    @torch.no_grad()
    def generate(self, x):
        for _ in range(3):
            x = self(x)
        return x

    def loss(self, x):
        return self.head(torch.sin(self.encode(x))).square().mean()

    def mixed(self, x):
        return self.loss(x) + self(x).square().mean()

    def labelled(self, x, y):
        return nn.functional.cross_entropy(self(x), y)


class Checked(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.blocks, self.trap = nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), Trap()
        self.last, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(self.trap(h))


class Partly(nn.Module):
    """A frozen layer under trained ones."""

    def __init__(self):
        super().__init__()
        self.base, self.middle, self.head = (
            nn.Linear(4, 8).requires_grad_(False),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.base(x)))))


class Batched(nn.Module):
    """Batch norm: all ranks must get one batch to be one process."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.trap = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), Trap()

    def forward(self, x):
        return self.b(self.trap(torch.relu(self.norm(self.a(x)))))


class Counting(nn.Module):
    """Buffers that a forward changes: a number of calls, in and out of the state dict."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.hidden.mul_(0.9)
        return self.out(torch.tanh(self.layer(x))) * self.hidden


class Recurrent(nn.Module):
    """Words through a GRU whose first state is made like a weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.out = (
            nn.Embedding(10, 4),
            nn.GRU(4, 6, batch_first=True),
            nn.Linear(6, 10),
        )

    def forward(self, x):
        start = next(self.parameters()).new_zeros(1, len(x), 6)
        return self.out(self.rnn(self.embedding(x), start)[0])


class Scaled(nn.Module):
    """A parameter that is one number."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale


class Phases(nn.Module):
    """A buffer of complex numbers."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x):
        return self.out(torch.tanh((self.layer(x) * self.phase).imag))


class Gaps(nn.Module):
    """A parameter and a buffer between whose numbers others lie in memory, as in rotary tables."""

    def __init__(self):
        super().__init__()
        table = torch.complex(torch.randn(5, 4), torch.randn(5, 4))
        self.weight = nn.Parameter(table.real[:4])
        self.register_buffer("shift", table.imag[4])

    def forward(self, x):
        return torch.tanh(x @ self.weight) + self.shift


class Attention(nn.Module):
    """Rows as sequences of one position per feature, through torch's own layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.layer(self.first(x.unsqueeze(-1)))).squeeze(-1)


class Agent(nn.Module):
    """A head on an encoder, which other models may have, too."""

    def __init__(self, encoder=None):
        super().__init__()
        self.encoder, self.trap = encoder or nn.Sequential(nn.Linear(4, 6), nn.Tanh()), Trap()
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.trap(self.encoder(x)))


class Opaque:
    """An output that no library knows."""

    def __init__(self, out):
        self.out = out


class Veiled(Block):
    """A block, of which FSDP makes a group, with its output in an object."""

    def forward(self, x):
        return SimpleNamespace(out=super().forward(x))


class Hides(nn.Module):
    """A forward whose tensor is out of sight: in a distribution, an object, a closure or a list."""

    def __init__(self, where):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Veiled(), nn.Linear(4, 4)
        self.where, self.trap = where, Trap()

    def forward(self, x, into=None):
        out = self.last(self.trap(self.block(self.first(x)).out))
        if self.where == "list":
            into.append(out)
            return None
        return {
            "normal": lambda: torch.distributions.Normal(out, 1.0),
            "object": lambda: Opaque(out),
            "closure": lambda: lambda: torch.tanh(out),
            "block": lambda: out,
        }[self.where]()


def collected(model, x):
    """What a forward appends to a list."""
    into = []
    model(x, into)
    return into[0].to(x.dtype)  # under autocast, too


class Ordered(nn.Module):
    """Buffers of equal sizes that are registered in another order on every second rank."""

    def __init__(self, rank):
        super().__init__()
        self.layer, buffers = nn.Linear(4, 4), {"gain": torch.arange(4.0), "shift": torch.ones(4)}
        for name in sorted(buffers, reverse=rank % 2 == 1):
            self.register_buffer(name, buffers[name])

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.gain + self.shift


class Growing(nn.Module):
    """A table that grows to what this rank's data need, out of the state dict."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(1, 4), persistent=False)

    def forward(self, x):
        need = 1 + int(4 * x.detach().abs().max())
        if need > len(self.table):
            self.table = torch.arange(float(need))[:, None].mul(torch.ones(4)).cos()
        return self.out(torch.tanh(self.layer(x))) + self.table[0]


class Follows(nn.Module):
    """A frozen part that each forward in training moves to the trained one, as in MoCo and BYOL."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer, self.follower = how, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for new, old in zip(self.layer.parameters(), self.follower.parameters(), strict=True):
            if self.how == "data":
                old.data = old.data * 0.5 + new.data * 0.5
            else:
                old.lerp_(new, 0.5)

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.follow()
        return torch.tanh(self.layer(x)) + self.follower(x)


# what loops call


def clip_left_in(fabric, model, limit):
    """As `clip_by_hand`, where gradients carry a loss scale."""
    clip_by_hand(fabric, model, limit)


def assign_grads(model, factor):
    """As `scale_by_hand`, by other memory in the place of the gradients'."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data * factor


def assign_weights(model, factor):
    """Weights times a number, by one vector of all of them."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * factor, model.parameters())


def add_hooks(model, how):
    """Hooks of the user's, each of which halves a gradient."""
    for p in [p for p in model.parameters() if p.requires_grad][:2]:
        if how == "tensor":
            p.register_hook(lambda grad: grad * 0.5)
        else:
            p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


# data sets


class Rows(Dataset):
    """Numbered rows: (number, (4,))."""

    def __init__(self, count):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index]


class Stream(IterableDataset):
    """The same as a stream; `split` says who takes what: "workers", "group", "all", or a (rank, count)."""

    def __init__(self, count, split=None):
        self.rows, self.split = Rows(count), split

    def __iter__(self):
        rank, count = self.split if isinstance(self.split, tuple) else (0, 1)
        if self.split in ("group", "all") and dist.is_initialized():
            rank, count = dist.get_rank(), dist.get_world_size()
        info = get_worker_info()
        if self.split in ("workers", "all") and info is not None:
            rank, count = rank * info.num_workers + info.id, count * info.num_workers
        for index in range(rank, len(self.rows), count):
            yield self.rows[index]


class Named(Stream):
    """A stream that shares itself out, and says so."""

    def __init__(self, count, rank, world_size):
        super().__init__(count, (rank, world_size))
        self.rank, self.world_size = rank, world_size


class Backwards(Sampler):
    """A sampler of the user's own."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))


class Drawn(Sampler):
    """A sampler that draws from a generator of its own."""

    def __init__(self, count):
        self.count, self.generator = count, torch.Generator().manual_seed(5)

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count, generator=self.generator).tolist())
