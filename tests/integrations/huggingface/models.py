"""Tiny models of transformers, their data, and how each is split: what users write."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.vit.modeling_vit import ViTLayer

WORDS = 64
STEPS = 3
ROWS = 8
LENGTH = 12


def gpt2():
    """Tied: the head is the embedding."""
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return made(GPT2LMHeadModel, GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def llama(tied=False):
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return made(LlamaForCausalLM, LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def vit():
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5}
    return made(ViTForImageClassification, ViTConfig(**sizes, **layers))


MODELS = {"gpt2": gpt2, "llama": llama, "tied llama": lambda: llama(tied=True), "vit": vit}


def made(kind, config):
    torch.manual_seed(0)
    return kind(config).train()


def batches(model, steps=STEPS):
    """Whole batches, of which ranks take their rows."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if model == "vit":
            pixels = torch.randn(ROWS, 3, 8, 8, generator=generator)
            yield {"pixel_values": pixels, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}
        else:
            ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
            yield {"input_ids": ids, "labels": ids}


BLOCKS = {GPT2Block, LlamaDecoderLayer, ViTLayer}
"""What FSDP gathers and frees together."""

STYLES = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
}
"""The names in a model's `tp_plan`, as torch says them."""


def by_plan(model, mesh, without=()):
    """Tensor parallel as the model's own plan says, and FSDP2 over what is left."""
    plan = {name: STYLES[style] for name, style in model.tp_plan.items() if name not in without}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    model.tie_weights()  # torch has split each name by itself
    if mesh["data_parallel"].size() > 1:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def by_plan_to_compile(model, mesh):
    """torch 2.13 itself gives a split embedding wrong gradients if compiled blocks under FSDP2 follow it."""
    return by_plan(model, mesh, without=("model.embed_tokens",))


class Positions(nn.Embedding):
    def forward(self, x):
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


class StagedGPT2(GPT2LMHeadModel):
    """GPT-2 as a chain of blocks (without dropout of the embedding), under its own keys."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer.wpe = Positions(config.n_positions, config.n_embd)

    def pipeline_blocks(self):
        gpt = self.transformer
        return [gpt.wte, gpt.wpe, *gpt.h, gpt.ln_f, self.lm_head]


class Layer(LlamaDecoderLayer):
    """With positions of its own: a block takes what the one before returned, and nothing else."""

    def __init__(self, config, number):
        super().__init__(config, number)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return super().forward(x, position_embeddings=self.rotary(x, positions))


class StagedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))

    def pipeline_blocks(self):
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]


class OfFirstToken(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, 0])


class StagedViT(ViTForImageClassification):
    def __init__(self, config):
        super().__init__(config)
        self.classifier = OfFirstToken(config.hidden_size, config.num_labels)

    def pipeline_blocks(self):
        return [self.vit.embeddings, *self.vit.layers, self.vit.layernorm, self.classifier]


def staged(model):
    """The same weights in a model that lists its blocks."""
    kinds = {GPT2LMHeadModel: StagedGPT2, LlamaForCausalLM: StagedLlama, ViTForImageClassification: StagedViT}
    made = kinds[type(model)](model.config)
    made.load_state_dict(model.state_dict())
    made.tie_weights()
    return made
