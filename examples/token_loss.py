"""A loss per token over padded sequences: the same gradients however sequences are spread over processes.

Sequences have different lengths, so a batch has tokens and padding. The mean loss of a micro-batch weighs a
token by how many others happen to be in it, and the mean of such means depends on how the batch was split.
Here each backward takes the SUM over tokens, and one call divides by the tokens of all processes and
micro-batches:

    -         loss = cross_entropy(...) / accumulate
    +         loss = cross_entropy(..., reduction="sum")
              num_tokens += (targets != PAD).sum()
    ...
    + fabric.normalize_gradients(model, num_tokens)      # before clipping and the step

The last step of the epoch has fewer sequences, and some micro-batches fewer than others; nothing changes for
them. Afterwards rank zero trains a copy in plain torch on whole batches, and compares the weights.

    python examples/token_loss.py --devices 2
    python examples/token_loss.py --devices 2 --mean     # the mean of means: other weights
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from fabric import Fabric

TEXTS = [text.strip() for _, topic in sorted(topics.items()) for text in topic.split("\n\n")]  # Python's help
ALPHABET = {character: i for i, character in enumerate(sorted(set("".join(TEXTS))))}
PAD = -100


class Reader(nn.Module):
    """Characters to logits of each next one, from left to right: padding at the end changes nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 32)
        self.cells = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(ALPHABET))

    def forward(self, x):
        """(batch, time) to (batch, time, characters)."""
        return self.head(self.cells(self.embed(x))[0])


def load_sequences(count):
    """`count` paragraphs of 2 to 80 characters, in an order that does not depend on processes."""
    order = torch.randperm(len(TEXTS), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [TEXTS[i][:80] for i in order if len(TEXTS[i]) > 1][:count]
    return [torch.tensor([ALPHABET[character] for character in text]) for text in texts]


def pad(sequences):
    """(inputs, targets), both (batch, time): each character's successor, and PAD where there is none."""
    inputs = pad_sequence([sequence[:-1] for sequence in sequences], batch_first=True)
    targets = pad_sequence([sequence[1:] for sequence in sequences], batch_first=True, padding_value=PAD)
    return inputs, targets


def loss_of(model, inputs, targets, reduction="sum"):
    """The loss of all tokens that are not padding."""
    return F.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction=reduction
    )


def train(fabric, args):
    """The work of every rank."""
    sequences = load_sequences(args.sequences)
    fabric.seed_everything(0, verbose=False)
    model = Reader()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))

    rows = args.batch_size // args.accumulate // fabric.world_size
    loader = fabric.setup_dataloaders(DataLoader(sequences, batch_size=rows, collate_fn=pad))
    total = torch.zeros((), device=fabric.device)
    num_tokens = 0
    for inputs, targets in loader:
        done = loader.batches_done  # of this epoch, those before a resume included
        ends_step = done % args.accumulate == 0 or done == len(loader)
        with fabric.no_backward_sync(model, enabled=not ends_step):  # one reduction a step
            loss = loss_of(model, inputs, targets)
            num_here = (targets != PAD).sum()
            fabric.backward(loss / num_here / args.accumulate if args.mean else loss)
        num_tokens += num_here
        total += loss.detach()
        if ends_step:
            if not args.mean:
                fabric.normalize_gradients(model, num_tokens)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_tokens = 0

    weights = model.state_dict()  # whole, whatever the strategy
    total = fabric.all_reduce(total, reduce_op="sum").item()
    if not fabric.is_global_zero:
        return
    plain, loss, tokens = train_plain(sequences, args.batch_size)
    apart = max((weights[name].cpu() - value).abs().max().item() for name, value in plain.items())
    print(
        f"token_loss: {fabric.world_size} process(es), {tokens} tokens, loss {total / tokens:.6f}; in plain "
        f"torch on whole batches {loss:.6f}, weights {'the same' if apart < 1e-5 else 'NOT the same'}"
    )


def train_plain(sequences, batch_size):
    """One process, one backward a step, the mean over its tokens: (weights, loss per token, tokens)."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    total = tokens = 0
    for start in range(0, len(sequences), batch_size):
        inputs, targets = pad(sequences[start : start + batch_size])
        loss = loss_of(model, inputs, targets, "mean")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        here = (targets != PAD).sum().item()
        total, tokens = total + loss.item() * here, tokens + here
    return model.state_dict(), total / tokens, tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A loss per token, over processes and micro-batches.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default=2)
    parser.add_argument("--sequences", type=int, default=1003)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, of all processes")
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per step")
    parser.add_argument("--mean", action="store_true", help="the mean of each micro-batch's mean, to compare")
    args = parser.parse_args()
    fabric = Fabric(accelerator=args.accelerator, strategy=args.strategy, devices=args.devices)
    fabric.launch(train, args)
