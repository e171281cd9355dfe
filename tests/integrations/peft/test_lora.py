"""LoRA adapters of peft under ddp and fsdp: plain torch on the joined batch, and files that peft reads."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from fabric import Fabric
from fabric.strategies import FSDPStrategy

STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "fsdp": lambda: "fsdp",
    "fsdp by blocks": lambda: FSDPStrategy(auto_wrap_policy={GPT2Block}),
}


def base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def with_lora():
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        return get_peft_model(base(), config).train()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (8, 12), generator=generator) for _ in range(3)]


def trained(model, optimizer, backward, data):
    losses = []
    for ids in data:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def plain():
    model = with_lora()
    return trained(model, adamw(model), torch.Tensor.backward, batches()), model


def on_ranks(strategy, folder):
    """What users write: the adapter's files are those of the whole model, on rank zero."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    model = with_lora()
    model, optimizer = fabric.setup(model, adamw(model))
    data = [ids[fabric.global_rank :: 2] for ids in batches()]
    losses = trained(model, optimizer, fabric.backward, data)
    with fabric.whole(model) as whole:
        if whole is not None:
            whole.save_pretrained(folder)
    return fabric.all_reduce(losses), model.state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_trains_what_plain_torch_trains(ranks, tmp_path, strategy):
    losses, state = ranks.run(on_ranks, strategy, str(tmp_path), world_size=2)[0]
    expected_losses, model = plain()
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    frozen = with_lora().state_dict()
    assert {name for name in state if not torch.equal(state[name], frozen[name])} == {
        name for name in state if "lora_" in name
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        read = PeftModel.from_pretrained(base(), tmp_path)
    expected = get_peft_model_state_dict(model)
    torch.testing.assert_close(get_peft_model_state_dict(read), expected, rtol=1e-4, atol=1e-5)
