"""What is done with a model beside training: outputs, generate, on one rank, files of Hugging Face."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from models import MODELS, batches, llama
from pages import blocks
from test_models import STRATEGIES, launched, world
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from fabric.cli import main

PLACES = [name for name in STRATEGIES if name != "pipeline"]
HOW = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 5}, "beams": {"num_beams": 3}}


def asked(model, how):
    """Tokens that follow; sampling is by the global random stream."""
    torch.manual_seed(5)
    (batch,) = batches("llama", 1)
    return model.generate(batch["input_ids"][:3, :4], max_new_tokens=6, pad_token_id=0, **HOW[how])


def generated(strategy, how, on_one):
    fabric = launched(strategy)
    name = "llama" if "tensor" in strategy else "gpt2"
    model = fabric.setup(MODELS[name]()).eval()
    if not on_one:
        return asked(model, how)
    with fabric.whole(model) as plain:
        return None if plain is None else asked(plain, how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", PLACES)
def test_generate_on_all_ranks(ranks, strategy, how):
    expected = asked(MODELS["llama" if "tensor" in strategy else "gpt2"]().eval(), how)
    for got in ranks.run(generated, strategy, how, False, world_size=world(strategy)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("strategy", PLACES)
def test_generate_on_one_rank(ranks, strategy):
    expected = asked(MODELS["llama" if "tensor" in strategy else "gpt2"]().eval(), "greedy")
    got, *others = ranks.run(generated, strategy, "greedy", True, world_size=world(strategy))
    assert torch.equal(got, expected)
    assert others == [None] * len(others)


def each_its_own(strategy):
    """Ranks of other prompts end after other numbers of tokens."""
    fabric = launched(strategy)
    model = fabric.setup(MODELS["gpt2"]()).eval()
    return [own_prompt(model, rank) for rank in (fabric.global_rank, 1 - fabric.global_rank)]


def own_prompt(model, rank):
    ids = torch.arange(1, 6 - 2 * rank)[None]
    return model.generate(ids, max_new_tokens=4 + 5 * rank, pad_token_id=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "fsdp by blocks"])
def test_each_rank_generates_from_a_prompt_of_its_own(ranks, strategy):
    model = MODELS["gpt2"]().eval()
    one, two = (own_prompt(model, rank) for rank in range(2))
    assert len(one[0]) != len(two[0])
    got = ranks.run(each_its_own, strategy, world_size=2)
    for first, second in zip(got, ([one, two], [two, one]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def output(strategy):
    fabric = launched(strategy)
    model = fabric.setup(llama())
    (batch,) = batches("llama", 1)
    out = model(**batch, output_hidden_states=True)
    assert type(out) is CausalLMOutputWithPast
    assert out.loss.requires_grad
    assert out["logits"] is out.logits
    return out.logits.detach(), [x.detach() for x in out.hidden_states]


@pytest.mark.parametrize("strategy", PLACES)
def test_outputs_are_the_models_own(ranks, strategy):
    (batch,) = batches("llama", 1)
    out = llama()(**batch, output_hidden_states=True)
    for logits, hidden in ranks.run(output, strategy, world_size=world(strategy)):
        torch.testing.assert_close(logits, out.logits.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden, [x.detach() for x in out.hidden_states], rtol=1e-5, atol=1e-5)


FROM_PRETRAINED = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "tied llama": LlamaForCausalLM}


def saved(name, strategy, folder):
    """What users write: the weights by Fabric, the rest by the model."""
    fabric = launched(strategy)
    model = fabric.setup(MODELS[name]())
    if fabric.is_global_zero:
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    fabric.save(f"{folder}/model.safetensors", {"model": model})


SAVES = [(name, strategy) for strategy in ("ddp", "zero1", "fsdp") for name in ("gpt2", "tied llama")]
SAVES += [("tied llama", "tensor parallel"), ("llama", "tensor parallel x fsdp")]


@pytest.mark.parametrize(("name", "strategy"), SAVES)
def test_from_pretrained_reads_what_fabric_has_saved(ranks, tmp_path, name, strategy):
    ranks.run(saved, name, strategy, str(tmp_path), world_size=world(strategy))
    read, info = FROM_PRETRAINED[name].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(read.state_dict(), MODELS[name]().state_dict(), rtol=0, atol=0)


def saved_whole(name, strategy, folder):
    fabric = launched(strategy)
    model = fabric.setup(MODELS[name]())
    with fabric.whole(model) as plain:
        if plain is not None:
            plain.save_pretrained(folder)


@pytest.mark.parametrize(("name", "strategy"), SAVES)
def test_save_pretrained_of_the_whole_model(ranks, tmp_path, name, strategy):
    ranks.run(saved_whole, name, strategy, str(tmp_path), world_size=world(strategy))
    read = FROM_PRETRAINED[name].from_pretrained(tmp_path)
    torch.testing.assert_close(read.state_dict(), MODELS[name]().state_dict(), rtol=0, atol=0)


def saved_in_files(name, strategy, folder):
    """The block of "Convert your script"."""
    fabric = launched(strategy)
    model = fabric.setup(MODELS[name]())
    (block,) = [b for b in blocks() if "max_shard_size" in b.code]
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # huggingface_hub asks for it
    exec(
        block.code.replace("5GB", "10KB"), {"fabric": fabric, "model": model, "folder": folder, "Path": Path}
    )


@pytest.mark.parametrize(("name", "strategy"), SAVES)
def test_the_files_of_the_page_are_those_of_save_pretrained(ranks, tmp_path, name, strategy):
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    ranks.run(saved_in_files, name, strategy, ours, world_size=world(strategy))
    MODELS[name]().save_pretrained(theirs, max_shard_size="10KB")
    names = [sorted(path.name for path in Path(folder).glob("*.safetensors")) for folder in (ours, theirs)]
    assert names[0] == names[1]
    assert len(names[0]) > 2
    read, info = FROM_PRETRAINED[name].from_pretrained(ours, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(read.state_dict(), MODELS[name]().state_dict(), rtol=0, atol=0)
    (again,) = {str(got) for got in ranks.run(sums, name, strategy, ours, world_size=world(strategy))}
    assert again == str(sums_of(read.state_dict()))


def sums_of(state):
    return {key: value.double().sum().item() for key, value in state.items()}


def sums(name, strategy, folder):
    return sums_of(loaded(name, strategy, folder))


def saved_in_parts(name, strategy, folder):
    fabric = launched(strategy)
    fabric.save(f"{folder}/parts", {"model": fabric.setup(MODELS[name]())})


@pytest.mark.parametrize(("name", "strategy"), [("gpt2", "fsdp"), ("tied llama", "tensor parallel x fsdp")])
def test_a_directory_of_parts_becomes_a_file_without_ranks(ranks, tmp_path, name, strategy):
    """Each rank writes its part, and the file is made in the memory of one tensor."""
    ranks.run(saved_in_parts, name, strategy, str(tmp_path), world_size=world(strategy))
    assert (
        main(["consolidate", str(tmp_path / "parts"), "--output", str(tmp_path / "model.safetensors")]) == 0
    )
    MODELS[name]().config.save_pretrained(tmp_path)
    read = FROM_PRETRAINED[name].from_pretrained(tmp_path)
    torch.testing.assert_close(read.state_dict(), MODELS[name]().state_dict(), rtol=0, atol=0)


def loaded(name, strategy, folder):
    """Without memory first; each rank reads its part of the files."""
    fabric = launched(strategy)
    kind = FROM_PRETRAINED[name]
    with fabric.init_module(empty_init=True):
        model = kind(kind.config_class.from_pretrained(folder))
    model = fabric.setup(model)
    fabric.load(folder, {"model": model})
    return model.state_dict()


@pytest.mark.parametrize("size", ["1GB", "10KB"])
@pytest.mark.parametrize(("name", "strategy"), SAVES)
def test_ranks_read_their_parts_of_files_of_hugging_face(ranks, tmp_path, name, strategy, size):
    model = MODELS[name]()
    torch.nn.init.normal_(next(model.parameters()))  # other values than the constructor's
    model.save_pretrained(tmp_path, max_shard_size=size)
    index = Path(tmp_path, "model.safetensors.index.json")
    assert index.exists() == (size == "10KB")
    if index.exists():
        assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2
    for got in ranks.run(loaded, name, strategy, str(tmp_path), world_size=world(strategy)):
        torch.testing.assert_close(dict(got), dict(model.state_dict()), rtol=0, atol=0)
