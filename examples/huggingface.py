"""Fine-tuning a small GPT-2 of transformers, with datasets and a tokenizer that is trained on the spot.

    pip install ".[huggingface]"
    python examples/huggingface.py --devices 2
    python examples/huggingface.py --devices 2 --strategy fsdp --precision bf16-mixed

Nothing is downloaded: the text is Python's own help, the model has random weights. The raw loop and this one:

     model = GPT2LMHeadModel(config)
     optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    +model, optimizer = fabric.setup(model, optimizer)
    -loader = DataLoader(windows, batch_size=32, shuffle=True)
    +loader = DataLoader(windows, batch_size=32 // fabric.world_size, shuffle=True)
    +loader = fabric.setup_dataloaders(loader)
     for batch in loader:
         optimizer.zero_grad()
         loss = model(**batch, labels=batch["input_ids"]).loss
    -    loss.backward()
    +    fabric.backward(loss)
         optimizer.step()
    -model.save_pretrained(folder)
    +with fabric.whole(model) as plain:
    +    if plain is not None:
    +        plain.save_pretrained(folder)
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fabric import Fabric

CONTEXT = 32
"""Tokens that the model sees at once."""


def load_tokenizer():
    """A byte-pair encoding of the text; every rank trains the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def load_windows(tokenizer, count):
    """Training and held-out windows of CONTEXT tokens."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text[: 8 * CONTEXT * count])["input_ids"])
    windows = ids.unfold(0, CONTEXT, CONTEXT)[:count].tolist()
    made = Dataset.from_dict({"input_ids": windows}).with_format("torch")
    return made.select(range(64, count)), made.select(range(64))


def train(fabric, args):
    """The work of every rank."""
    fabric.seed_everything(args.seed, verbose=False)
    tokenizer = load_tokenizer()
    windows, held_out = load_windows(tokenizer, 64 + args.steps * args.batch_size)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # ranks would drop different units
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=2 * CONTEXT, n_embd=64, n_layer=2, n_head=4, **dropout,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(windows, batch_size=args.batch_size // fabric.world_size, shuffle=True)
    loader, held_out_loader = fabric.setup_dataloaders(loader, DataLoader(held_out, batch_size=32))

    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = model(**batch, labels=batch["input_ids"]).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        if step % args.report_every == 0:
            fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()).item():.4f}")

    loss = evaluate(fabric, model, held_out_loader)
    with fabric.whole(model) as plain:  # None on the other ranks
        if plain is not None:
            again = save_and_generate(plain, tokenizer, fabric.device)
            print("the model writes:", repr(again))
    fabric.print(f"huggingface: {fabric.world_size} process(es), held-out loss {loss:.6f}")


@torch.no_grad()
def evaluate(fabric, model, loader):
    """Mean loss per held-out window; every window is seen once, on one rank."""
    model.eval()
    sums = {"loss": torch.zeros((), device=fabric.device), "count": 0}
    for batch in loader:
        rows = len(batch["input_ids"])
        sums["loss"] += rows * model(**batch, labels=batch["input_ids"]).loss
        sums["count"] += rows
    model.train()
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return sums["loss"].item() / int(sums["count"])


def save_and_generate(plain, tokenizer, device):
    """What a model writes that was read from the files of the one that was trained."""
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        read = GPT2LMHeadModel.from_pretrained(folder).to(device).eval()
    prompt = tokenizer("The value", return_tensors="pt").to(device)
    written = read.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=16)
    return tokenizer.decode(written[0])


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="A small GPT-2 of transformers on Python's own help text.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows per step, of all processes together"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--report-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
