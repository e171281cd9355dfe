"""torch.compile under every strategy: the table of fabric/strategies/compile.md, equal to plain torch."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fabric.strategies
from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import FSDPStrategy, LocalSGDStrategy, ModelParallelStrategy

PAGE = Path(fabric.strategies.__file__).with_name("compile.md")
BLOCKS = range(4)


class Block(nn.Module):
    """Four operations."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Chain(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(*[Block() for _ in BLOCKS])


class Net(Chain):
    """With a forward of its own: torch compiles no `nn.Sequential` in place."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def split(model, mesh):
    plan = {f"{i}.inner": ColwiseParallel() for i in BLOCKS} | {
        f"{i}.outer": RowwiseParallel() for i in BLOCKS
    }
    return parallelize_module(model, mesh["tensor_parallel"], plan)


STRATEGIES = {
    "single_device": lambda: "single_device",
    "dp": lambda: "dp",
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: "zero2",
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "hsdp": lambda: "hsdp",
    "tensor parallel": lambda: ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2),
    "pipeline": lambda: "pipeline",
    "local_sgd": lambda: LocalSGDStrategy(sync_every=1),
}
WAYS = {
    "whole before": (lambda net, how: torch.compile(net, **how), None),
    "whole after": (None, lambda net, how: torch.compile(net, **how)),
    "in place before": (lambda net, how: net.compile(**how), None),
    "blocks before": (lambda net, how: [block.compile(**how) for block in net], None),
    "blocks after": (None, lambda net, how: [block.compile(**how) for block in net.module]),
}


def compiled(how, net, settings):
    """What `how` gives, or the net, which it has changed."""
    made = how(net, settings) if how else net
    return made if isinstance(made, nn.Module) else net


def trained(strategy, way, backend="eager", atol=1e-6):
    """What was compiled: "one graph", "a graph per block", "nothing", and whether there were graph breaks."""
    warnings.simplefilter("ignore")  # torch's own, of its compiler
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def counting(graph, inputs):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    how = {"backend": counting if backend == "eager" else backend}
    world = dist.get_world_size() if dist.is_initialized() else 2 if strategy == "dp" else 1
    fabric = Fabric(accelerator="cpu", devices=world, strategy=STRATEGIES[strategy]())
    fabric.launch()
    kind = Chain if strategy == "pipeline" else Net
    net, plain = kind(), kind()
    before, after = WAYS[way]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(compiled(before, net, how), optimizer)
    model = compiled(after, model, how)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(1)
    rank, parts = fabric.strategy.data_rank
    for _ in range(3):
        x = torch.randn(2 * parts, 4)
        fabric.backward(model(x.chunk(parts)[rank]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        plain(x).pow(2).mean().backward()
        reference.step()
        reference.zero_grad()
    state = fabric.strategy.get_module_state_dict(model)
    for name, value in (plain.state_dict() if fabric.is_global_zero else {}).items():
        torch.testing.assert_close(state[name], value, atol=atol, rtol=1e-5, msg=name)
    broken = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return shape(graphs), "breaks" if broken else "no break"


def shape(graphs):
    if not graphs:
        return "nothing"
    # Blocks share code: torch compiles it once for each kind of input, not once for each block.
    if len(set(graphs)) > 1:
        return "pieces"
    return "one graph" if len(graphs) == 1 and graphs[0] >= 4 * len(BLOCKS) else "a graph per block"


def on_ranks(ranks, strategy, *args):
    if strategy in ("single_device", "dp"):
        return trained(strategy, *args)
    first, second = ranks.run(trained, strategy, *args, world_size=2)
    assert first == second
    return first


def rows():
    """(strategy, way, what stands in the page)."""
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for line in table:
        strategy, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for way, cell in zip(WAYS, cells, strict=True):
            yield strategy.split("`")[1], way, cell


def test_the_page_has_every_strategy():
    assert list(dict.fromkeys(strategy for strategy, *_ in rows())) == list(STRATEGIES)


def cases():
    alike = ("dp", "zero1", "zero2", "hsdp", "local_sgd")  # the layouts of others
    for row in rows():
        if row[2] != "refused":
            yield pytest.param(*row, marks=[pytest.mark.slow] if row[0] in alike else [])


@pytest.mark.parametrize(("strategy", "way", "cell"), list(cases()))
def test_the_page_is_true(ranks, strategy, way, cell):
    graphs, breaks = on_ranks(ranks, strategy, way)
    assert cell == (graphs if breaks == "no break" else f"{graphs}, breaks")


def test_a_compiled_model_is_no_pipeline(ranks):
    refused = [row[:2] for row in rows() if row[2] == "refused"]
    assert refused == [("pipeline", "whole before")]
    ranks.run(refuses, world_size=2)


def refuses():
    with pytest.raises(UsageError, match=r"^A compiled model cannot be cut into stages\. Compile its blocks"):
        trained("pipeline", "whole before")


def in_full(strategy, way):
    WAYS["in full"] = {
        "whole": (None, lambda net, how: torch.compile(net, **how, fullgraph=True)),
        "blocks": (lambda net, how: [block.compile(**how, fullgraph=True) for block in net], None),
    }[way]
    try:
        return trained(strategy, "in full")
    finally:
        del WAYS["in full"]


@pytest.mark.parametrize("strategy", ["tensor parallel", "local_sgd"])
def test_a_whole_model_in_full(ranks, strategy):
    assert ranks.run(in_full, strategy, "whole", world_size=2) == [("one graph", "no break")] * 2


def raises_in_full(strategy):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        in_full(strategy, "whole")


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pipeline"])
def test_where_the_page_has_breaks_a_whole_model_in_full_raises(ranks, strategy):
    ranks.run(raises_in_full, strategy, world_size=2)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("single_device", "dp")])
def test_blocks_in_full(ranks, strategy):
    assert ranks.run(in_full, strategy, "blocks", world_size=2) == [("a graph per block", "no break")] * 2


def replaced(strategy, when):
    def put(net, how):
        for i in BLOCKS:
            net[i] = torch.compile(net[i], **how)

    WAYS["replaced"] = (put, None) if when == "before" else (None, put)
    try:
        return trained(strategy, "replaced")
    finally:
        del WAYS["replaced"]


def raises_if_replaced(strategy):
    with pytest.raises(UsageError, match=r"Block 0 of Chain was replaced after fabric\.setup"):
        replaced(strategy, "after")


def test_a_block_of_a_pipeline_is_compiled_before_setup_else_it_raises(ranks):
    ranks.run(raises_if_replaced, "pipeline", world_size=2)
    assert ranks.run(replaced, "pipeline", "before", world_size=2) == [("a graph per block", "no break")] * 2


def unsplit():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=STRATEGIES["tensor parallel"]())
    fabric.launch()
    net = Net()
    for i in BLOCKS:
        net[i] = torch.compile(net[i], backend="eager")
    with pytest.warns(UserWarning, match="could not be resolved: no submodule matching"):
        model = fabric.setup(net)
    return [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in Net().parameters()]


def test_torch_warns_of_a_layer_that_has_another_name_since_it_was_compiled(ranks):
    assert ranks.run(unsplit, world_size=2) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("way", ["whole after", "blocks before"])
def test_inductor_computes_the_same(ranks, strategy, way):
    alone = strategy in ("single_device", "dp")
    inductor(strategy, way) if alone else ranks.run(inductor, strategy, way, world_size=2, timeout=400)


def inductor(strategy, way):
    environ = dict(os.environ)
    try:
        with torch._inductor.config.patch(compile_threads=1):  # its processes would stay
            trained(strategy, way, "inductor")
    finally:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_with_a_compiled_backward(ranks, strategy):
    on_ranks(ranks, strategy, "whole before", "aot_eager")


def trained_by_a_compiled_step(strategy):
    warnings.simplefilter("ignore")  # torch's own, of its compiler
    torch._dynamo.reset()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net, plain = Net(), Net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()

    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(4, 4)
        step(x[fabric.global_rank :: 2])
        reference.zero_grad()
        plain(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
    torch._dynamo.reset()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_step_with_backward_clip_and_step(ranks, strategy):
    ranks.run(trained_by_a_compiled_step, strategy, world_size=2)


def test_links_to_the_page():
    assert re.search(r"\(compile\.md\)", PAGE.with_name("README.md").read_text())
