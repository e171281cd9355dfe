"""Private names of torch: each is there and does what is needed of it; the docstring says what breaks."""

from __future__ import annotations

import ast
import copy
import pickle
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fabric
from fabric.batch_size import _torch as batch_size
from fabric.checkpoint.formats.sharded import _torch as sharded
from fabric.core import _torch as core
from fabric.core.torch_versions import collectives_recorded
from fabric.data import _torch as loaders
from fabric.guard import _torch as guard
from fabric.integrations import _torch as integrations
from fabric.loss_check import _torch as losses
from fabric.precision import _torch as precision
from fabric.profile import _torch as profile
from fabric.replicas import _torch as replicas
from fabric.report import _torch as report
from fabric.strategies import _torch as strategies
from fabric.strategies.context_parallel import _torch as context_parallel
from fabric.strategies.ddp import _torch as ddp
from fabric.strategies.deferred_init import _torch as deferred_init
from fabric.strategies.pipeline import _torch as pipeline
from fabric.strategies.sharding import _torch as sharding
from fabric.strategies.zero1 import _torch as zero1
from fabric.testing import RankPool
from fabric.testing import _torch as testing
from fabric.tools.plan import _torch as plan
from fabric.watchdog import _torch as watchdog

if TYPE_CHECKING:
    from collections.abc import Callable


PACKAGE = Path(fabric.__file__).parent


def test_each_name_has_a_test() -> None:
    """A name that no test uses would break in a user's run."""
    own = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    aliases = {
        node.module: node.names[0].asname
        for node in own.body
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "_torch"
    }
    tested = {ast.unparse(node) for node in ast.walk(own) if isinstance(node, ast.Attribute)}
    missing, names = [], set()
    for file in sorted(PACKAGE.rglob("_torch.py")):
        folder = ".".join(file.parent.relative_to(PACKAGE.parent).parts)
        defined = _defined(ast.parse(file.read_text(encoding="utf-8")))
        assert defined, file
        names |= defined
        missing += [f"{folder}: {name}" for name in defined if f"{aliases.get(folder)}.{name}" not in tested]
    assert missing == []
    assert {
        "BatchNorm",
        "register_pre_backward",
        "will_run",
        "COUNTED_STEP",
        "STEPPED",
        "pin_memory",
    } <= names


def _defined(tree: ast.Module) -> set[str]:
    """Return the names of functions and values that a file defines at its top level."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    values = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    stored = [part for node in values for part in ast.walk(node) if isinstance(part, ast.Name)]
    return functions | {part.id for part in stored if isinstance(part.ctx, ast.Store)}


def test_batch_norm_is_the_class_of_all_batch_norms() -> None:
    """Warnings of statistics that differ between ranks, and what FSDP keeps in single precision."""
    for kind in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm):
        assert issubclass(kind, core.BatchNorm)
    assert not issubclass(torch.nn.LayerNorm, core.BatchNorm)


def test_dropout_is_the_class_of_all_dropouts() -> None:
    """`fabric check` compares gradients without it."""
    for kind in (torch.nn.Dropout, torch.nn.Dropout2d, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout):
        assert issubclass(kind, testing.Dropout)


def test_the_operation_behind_item() -> None:
    """`p.norm().item()` of a part would be this rank's, without a word."""
    assert strategies.value_of(torch.tensor(2.5)) == 2.5


def test_passes_have_numbers_that_grow_and_calls_run_at_their_end() -> None:
    """Gradients and buffers are synchronised at the end of the outermost pass, once."""
    seen: list[object] = []

    def hook(grad: torch.Tensor) -> None:
        seen.append(core.backward_pass())
        strategies.call_after_backward(lambda: seen.append(weight.grad is not None))

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    assert core.backward_pass() == -1
    (weight * 2).sum().backward()
    (weight * 2).sum().backward()
    first, ended, second, ended_too = seen
    assert ended is ended_too is True
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert 0 <= first < second
    assert core.backward_pass() == -1


def test_a_clip_is_seen_before_it_changes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own clip of gradients that carry the loss scale would go unseen, and nothing be trained."""
    module, seen = torch.nn.utils.clip_grad, []
    name = "_group_tensors_by_device_and_dtype"
    monkeypatch.setattr(module, name, getattr(module, name))
    core.before_clips(lambda grads: seen.append([grad.tolist() for grad in grads]))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([3.0])
    torch.nn.utils.clip_grad_norm_([weight], 2.0)
    torch.nn.utils.clip_grad_value_([weight], 1.0)
    assert seen[0] == [[3.0]]
    assert torch.tensor(seen[-1]).allclose(torch.tensor(2.0))
    assert weight.grad.tolist() == [1.0]


def test_the_function_that_runs_the_engine(monkeypatch):
    """A gradient of torch.autograd.grad is reported, also if the loop imported the function by its name."""
    from torch.autograd import grad

    namespace, seen = torch.autograd, []
    monkeypatch.setattr(namespace, "_engine_run_backward", namespace._engine_run_backward)
    core.after_grads(lambda inputs, grads: seen.append(([*inputs], [*grads])))
    weight, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    (weight * 2).sum().backward()
    assert seen == []
    found = grad((weight * 3).sum(), iter([weight, other]), allow_unused=True)
    assert seen == [([weight, other], [found[0], None])]
    assert found[0].tolist() == [3.0]


def test_the_error_of_gradients_that_are_not_in_the_graph(monkeypatch):
    """`after_grads` reports them as None before torch raises it."""
    namespace, seen = torch.autograd, []
    monkeypatch.setattr(namespace, "_engine_run_backward", namespace._engine_run_backward)
    core.after_grads(lambda inputs, grads: seen.append(([*inputs], [*grads])))
    weight, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=core.UNUSED):
        torch.autograd.grad((weight * 3).sum(), [weight, other])
    assert seen == [([weight, other], [None, None])]


def test_a_node_of_a_graph_has_a_number() -> None:
    """It is that of the same node, also after Python has dropped it."""
    weight = torch.nn.Parameter(torch.ones(1))
    first = weight * 2
    number = core.node_number(first.grad_fn)
    loss = (first + 1).sum()
    del first
    below = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    assert core.node_number(below) == number
    assert core.node_number(loss.grad_fn) != number


def test_gradients_are_written_by_a_node_that_conversions_replace() -> None:
    """A model that was converted after setup is an error: DDP's reducer hooks the nodes of setup."""
    weight = torch.nn.Parameter(torch.ones(1))
    first = ddp.accumulator_of(weight)
    seen: list[object] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(ddp.running_node()))
    (weight * 2).sum().backward()
    weight.data = weight.data.double()
    weight.data = weight.data.float()
    weight.grad = None
    (weight * 2).sum().backward()
    assert [node is first for node in seen] == [True, False]
    assert ddp.running_node() is None


def test_tensors_of_weak_references_stay_usable() -> None:
    """Frozen and moved parameters are held weakly; torch 2.9 would lose those that C++ alone holds."""
    holder = torch.nn.Linear(1, 1)
    ref = weakref.ref(holder.weight)
    assert core.tensor_of(ref) is holder.weight
    del holder
    assert core.tensor_of(ref) is None


def test_operations_on_lists_are_those_of_their_names() -> None:
    """Clipping, packing of gradients and their means: one kernel for many tensors."""
    lists = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in core.foreach_norm(lists, 2.0)] == [5.0, 2.0]
    core.foreach_mul_(lists, 2.0)
    core.foreach_div_(lists, 4.0)
    assert [t.tolist() for t in lists] == [[1.5, 2.0], [1.0]]
    core.foreach_copy_(lists, [torch.zeros(2), torch.ones(1)])
    assert [t.tolist() for t in lists] == [[0.0, 0.0], [1.0]]


def test_nodes_that_the_pass_that_runs_comes_to() -> None:
    """A plain `loss.backward()` past `fabric.backward` is refused, `torch.autograd.grad` is not."""
    seen: list[bool] = []
    used, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    edges = [torch.autograd.graph.get_gradient_edge(weight) for weight in (used, other)]
    out = used * 2 + other
    out.register_hook(lambda grad: seen.extend([core.will_run(edge.node) for edge in edges]))
    out.sum().backward(inputs=[used])
    assert seen == [True, False]


def test_views_that_a_custom_function_passed_on() -> None:
    """Hooks of outputs hang on what a backward comes to, whatever is changed in place afterwards."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad

    base = torch.ones(4, requires_grad=True) * 2
    assert core.is_custom_function_input(Same.apply(base))
    assert not core.is_custom_function_input(base[:2])


def test_schedulers_hear_of_steps_that_the_scaler_skips() -> None:
    """Under 16-mixed the first steps may be skipped: the scheduler would warn (an error here)."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert not hasattr(optimizer.step, precision.COUNTED_STEP)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, precision.COUNTED_STEP)
    setattr(optimizer, precision.STEPPED, True)
    scheduler.step()


def test_modules_hold_their_tables_under_these_names() -> None:
    """`register_buffer`, `functional_call` and state dict hooks on a set-up model are the user's module's."""
    assert {*core.MODULE_TABLES, *integrations.CALL_TABLES} <= {*vars(torch.nn.Module())}


def test_hooks_on_saved_tensors_are_seen() -> None:
    """ContextParallel would keep what activations that are computed again must not keep, or the other way."""
    assert not context_parallel.packs_saved_tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert context_parallel.packs_saved_tensors()


def test_passes_that_accumulate_are_told_from_those_that_do_not() -> None:
    """`torch.autograd.grad` through a pipeline would add to `.grad` of its stages' parameters."""
    seen: list[bool] = []
    weight = torch.ones(1, requires_grad=True)
    for run in (torch.autograd.backward, lambda loss: torch.autograd.grad(loss, [weight])):
        middle = weight * 2
        middle.register_hook(lambda grad: seen.append(pipeline.accumulates()))
        run((middle * 3).sum())
    assert seen == [True, False]


def test_passes_that_keep_the_graph_are_told_from_those_that_do_not() -> None:
    """A pipeline's stages would let go of what a second backward needs, or hold it for ever."""
    seen: list[bool] = []
    middle = torch.ones(1, requires_grad=True) * 2
    middle.register_hook(lambda grad: seen.append(pipeline.keeps_graph()))
    loss = (middle * 3).sum()
    for keep in (True, False):
        loss.backward(retain_graph=keep)
    assert seen == [True, False]


def _groups() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    states = context_parallel.groups_inside(model)
    assert len(states) == 2
    assert context_parallel.groups_inside(model[0]) == []
    called: list[object] = []
    model[0].forward = lambda x: called.append(type(model[0].weight.data).__name__) or x  # type: ignore[assignment]
    with context_parallel.without_unshard(states) as dtype:
        model[0](torch.ones(1, 2))
    model[0](torch.ones(1, 2))
    assert dtype is torch.bfloat16
    assert called == ["DTensor", "Tensor"]


def test_groups_are_called_without_gathering(tmp_path: Path) -> None:
    """Trials of ContextParallel under FSDP: one row of ranks would send what the others do not take."""
    _in_a_group(_groups, tmp_path)


def test_function_transforms_say_that_they_run() -> None:
    """Strategy "dp" does not split what vmap has made of a batch; FSDP2 hangs its own hooks on outputs."""
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(core.in_function_transform())
        return x.sum()

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True, True]


def test_views_have_the_number_of_their_memory() -> None:
    """Tied weights are gathered once; parts on the meta device find the tensor that they are parts of."""
    for device in ("cpu", "meta"):
        one, other = torch.ones(4, device=device), torch.ones(4, device=device)
        assert core.memory_of(one[2:]) == core.memory_of(one) != core.memory_of(other)


def test_views_are_made_again_of_another_base() -> None:
    """A write into a row of a sharded parameter is made in the gathered one."""
    base, other = torch.zeros(4, 3), torch.zeros(4, 3)
    for view in (base[1:][0], base.t()[2], base.view(-1)[3:5], base.chunk(3)[1]):
        assert core.base_of(view) is base
        sharding.view_of(view, other).add_(1)
        view.add_(1)
    assert core.base_of(base) is None
    torch.testing.assert_close(other, base)
    assert base.any()


def _look_into_fsdp() -> list[bool]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.ones(1, 2))
        states = sharding.fsdp_states(model)
        groups = sharding.fsdp_groups(states)
        weight: torch.Tensor = model[0].weight
        return [
            core.is_fsdp(model) and not core.is_fsdp(model[1]),
            all(vars(part)[mark] for part in model.modules() for mark in strategies.FSDP_MARKS),
            strategies.fsdp_state(model) in states,
            len(states) == 2 and [len(group.fsdp_params) for group in groups] == [2, 2],
            isinstance(weight, DTensor) and core.memory_of(weight) == core.memory_of(weight.to_local()),
            torch.ops.aten.is_same_size.default in sharding.dtensor_handlers(),
            _became(weight.detach().clone(), weight),
            any(str(key).startswith(strategies.STATE_KEYS) for key in vars(model)),
        ]
    finally:
        dist.destroy_process_group()


def test_fsdp_and_dtensors_show_what_they_are_made_of() -> None:
    """Parts are those of the optimizer between calls; numbers and draws of DTensors are those of one rank."""
    assert _look_into_fsdp() == [True] * 8


def _became(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    sharding.assign_shards(copy, weight.detach() + 1)
    return torch.equal(copy.full_tensor(), weight.full_tensor() + 1)  # type: ignore[attr-defined]


def test_tensors_flatten_into_one() -> None:
    """Small leaves of a tree travel in one message, gradients in one bucket."""
    flat = core.flatten_tensors([torch.ones(2, 1), torch.zeros(1)])
    assert flat.tolist() == [1.0, 1.0, 0.0]


def test_tensor_classes_are_not_asked() -> None:
    """What reads a stored tensor would be asked for all of it."""

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    tensor = torch.ones(2).as_subclass(Asked)
    with core.no_subclass_functions():
        assert (tensor + 1).sum().item() == 4


def test_operations_say_what_they_change_and_run_without_the_class() -> None:
    """Parameters without memory record what changes them, and would be asked about it without end."""
    seen: list[object] = []

    class Recorded(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append([t.shape for t in deferred_init.written_by(func, args, kwargs or {})])
            with deferred_init.no_subclass_dispatch():
                return func(*args, **(kwargs or {}))

    tensor = torch.ones(2, 3).as_subclass(Recorded)
    tensor.normal_()
    torch._foreach_mul_([tensor, tensor[0]], 2.0)
    torch.add(torch.ones(3), tensor[1], out=torch.ones(3).as_subclass(Recorded))
    assert [shapes for shapes in seen if shapes] == [[(2, 3)], [(2, 3), (3,)], [(3,)]]


def test_running_iterations_are_known_and_workers_are_dropped() -> None:
    """Loaders that yield from an old iterator are refused; positions reach workers that live on."""
    loader = torch.utils.data.DataLoader(range(3))  # type: ignore[arg-type]
    assert isinstance(iter(loader), loaders.loader_iterator())
    assert loader._iterator is None
    loader._iterator = iter(loader)
    loaders.drop_workers(loader)
    assert loader._iterator is None


def test_iterations_tell_whether_they_go_on() -> None:
    """A loop on several ranks whose loader was never set up is warned of."""
    running = iter(torch.utils.data.DataLoader([torch.ones(1)] * 2))  # type: ignore[arg-type]
    found = [core.is_underway(running)]
    for _ in running:
        found.append(core.is_underway(running))
    assert found == [False, True, False]


def test_batches_of_unknown_classes_are_pinned_by_their_own_method() -> None:
    """Batches of iterable datasets come with a note, in a class of our own."""
    assert loaders.pin_memory({"a": [1, "b"]}) == {"a": [1, "b"]}

    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    assert loaders.pin_memory([Pinned()]) == ["pinned"]


def test_a_worker_may_take_itself_for_the_only_process() -> None:
    """A dataset that splits itself by worker would be split twice."""
    from torch.utils.data._utils import worker

    before, worker._worker_info = worker._worker_info, "info"  # type: ignore[assignment]
    try:
        with loaders.without_worker_info():
            assert torch.utils.data.get_worker_info() is None
        assert torch.utils.data.get_worker_info() == "info"
    finally:
        worker._worker_info = before


def test_saved_of_loss():
    """Without it, means over unequal numbers of tokens are not warned of."""
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, -100]))
    node = loss.grad_fn
    assert type(node).__name__ == "NllLossBackward0"
    assert (losses.saved(node, "total_weight"), losses.saved(node, "reduction")) == (1.0, 1)
    assert losses.saved(logits.mean().grad_fn, "self_sym_numel") == 6
    node = (logits.sum() / 4).grad_fn
    assert type(node).__name__ == "DivBackward0"
    assert losses.saved(node, "other") == 4
    assert losses.saved(node, "nothing") is None


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_shapes_of_losses() -> None:
    """Without them, the root of a mean over each rank's rows is not warned of."""
    x = torch.ones(2, 3, requires_grad=True)
    assert [losses.shape_of(y.grad_fn) for y in (x.sqrt(), x.mean(), x.sum(0))] == [(2, 3), (), (3,)]
    node = x.split([1, 2], dim=1)[1].sqrt().grad_fn
    assert losses.shape_of(*node.next_functions[0]) == (2, 2)
    nested = torch.nested.nested_tensor([*x.detach()], requires_grad=True).sin()
    assert [losses.is_nested(y.grad_fn) for y in (x.sqrt(), nested)] == [False, True]


def test_a_view_has_a_base() -> None:
    """The loss check would not recognise a loss of an output that the loop wrote into."""
    out = torch.ones(2, 2, requires_grad=True) * 1
    assert core.base_of(out.view(4)) is out
    assert core.base_of(out) is None


def test_calls_of_compiled_modules_are_watched() -> None:
    """The loss check would not see calls of models that are compiled after setup."""
    module, seen, x = torch.nn.Linear(2, 2), [], torch.ones(1, 2)
    losses.watch_compiled(module, lambda *call: seen.append(call))
    compiled = torch.compile(module, backend="eager")
    compiled(x)
    assert seen == [(module, (x,), {})]
    losses.unwatch_compiled(module, True)
    compiled(x)
    assert len(seen) == 1
    losses.unwatch_compiled(module, False)
    compiled(x)
    assert not {*vars(module)} & {"_initialize_hook", "_infer_parameters"}
    losses.wrap_compiled_call(module, lambda call: 1 / 0)  # not compiled in place
    module.compile(backend="eager")
    losses.wrap_compiled_call(module, lambda call: lambda x: (seen.append(x), call(x)))
    module(x)
    assert seen[1:] == [x]
    assert losses.do_nothing(module, (), {}) is None


def _in_a_group(call: Callable[[], None], tmp_path: Path) -> None:
    """In a process of its own, the only rank of a group."""
    torch.multiprocessing.spawn(_as_rank, (str(tmp_path / "store"), call))


def _as_rank(rank: int, path: str, call: Callable[[], None]) -> None:
    with collectives_recorded():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(path, 1), rank=0, world_size=1
        )
    call()
    if torch.distributed.is_initialized():  # else its threads may end the process by SIGABRT at exit
        torch.distributed.destroy_process_group()


class _Half(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rest = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, both: bool) -> torch.Tensor:
        return self.used * self.rest if both else self.used * 2


def _one_reducer() -> None:
    replica = torch.nn.parallel.DistributedDataParallel(_Half())
    seen: list[int] = []

    def hook(state, bucket):
        state.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(seen, hook)
    armed = replica(True)
    ddp.disarm(replica.reducer)
    armed.backward()
    assert not seen
    replica(False).backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        ddp.check_reduced(replica)
    ddp.renew_reducer(replica, [*replica.parameters()])
    for turn in (1, 2):
        replica(True).backward()
        ddp.check_reduced(replica)
        if not ddp.has_built_buckets(replica):
            ddp.build_buckets(replica)
        assert len(seen) == turn
    assert ddp.has_built_buckets(replica)
    twin = copy.deepcopy(replica)
    ddp.restore_comm_hooks(twin)
    twin(True).backward()
    assert [len(state) for _, state in twin._comm_hooks] == [3]
    assert len(seen) == 2
    used, rest = replica.module.used, replica.module.rest
    ddp.leave_out(replica, {rest}, [used])
    replica(False).backward()
    ddp.check_reduced(replica)  # waits for `used` alone
    ddp.leave_out(replica, {used, rest}, [])
    assert not replica.require_backward_grad_sync
    assert copy.deepcopy(replica).reducer is not None


def test_reducers_of_ddp(tmp_path: Path) -> None:
    """Passes that fail or keep gradients local, and nested ones: else gradients would be sent half-made."""
    _in_a_group(_one_reducer, tmp_path)


def _one_split_model() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    for part in (*model, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sharding.begin_fsdp(model)
    sharding.set_frozen_group_dtypes(model)
    state = strategies.fsdp_state(model[1])
    (group,) = sharding.fsdp_groups([state])
    weight = group.fsdp_params[0]
    assert core.is_fsdp(model[1])
    assert len(sharding.fsdp_states(model)) == 3
    assert strategies.computes_in(model[1]) is torch.bfloat16
    assert weight.sharded_param is model[1].weight
    assert sharding.unsharded_of(weight) is None
    assert sharding.phase(state) == "IDLE"
    hung: list[object] = []
    sharding.register_pre_backward_in_place(
        state, lambda out: sharding.register_pre_backward(state, hung.append(out) or out)
    )
    seen: list[object] = []
    look = lambda *_: seen.extend([sharding.phase(state), sharding.in_forward(state)])  # noqa: E731
    model[1].register_forward_pre_hook(look)
    out = model(torch.ones(1, 2))
    assert seen == ["FORWARD", True]
    assert len(hung) == 1
    assert not sharding.in_forward(state)
    assert sharding.is_prefetched(group) is False
    group.unshard(async_op=True)
    group.reshard()
    model[0].requires_grad_(True)
    out.sum().backward()
    assert weight.sharded_param.grad is not None
    assert sharding.unsharded_of(weight) is not None
    weight.sharded_param.grad = None
    whole = sharding.unsharded_of(weight)
    whole.grad = torch.ones_like(whole, dtype=getattr(whole, "grad_dtype", None))
    root = strategies.fsdp_state(model)
    reduced: list[int] = []
    sharding.reduce_in_place(
        model, lambda reduce, group, number: reduced.append(len(group.fsdp_params)) or reduce()
    )
    sharding.finish_backward(root)
    assert sorted(reduced) == sorted(
        len(g.fsdp_params) for g in sharding.fsdp_groups(sharding.fsdp_states(model))
    )
    assert sharding.unsharded_of(weight).grad is None
    assert weight.sharded_param.grad is not None
    sharding.unshard_root(root, model)
    sharding.reshard_root(root, model, torch.ones(1, requires_grad=True) * 2)
    group.unshard()
    group.wait_for_unshard()
    assert model[1].weight is sharding.unsharded_of(weight)
    model[1].weight = weight.sharded_param
    other = torch.nn.Sequential(model[1], torch.nn.Linear(2, 2))
    fully_shard(other)
    sharding.begin_fsdp(other)  # the group of `model[1]` keeps its root
    assert state in sharding.fsdp_states(model)
    assert len(sharding.fsdp_states(other)) == 1
    sharding.keep_unsharded(model[1])
    group.unshard()
    model.state_dict()
    group.reshard_after_forward = None
    assert group._sharded_state.name == "UNSHARDED"


def test_groups_and_parts_of_fsdp(tmp_path: Path) -> None:
    """Calls of methods and layers, calls that fail, nested backwards: `sharding/gathered.py`."""
    _in_a_group(_one_split_model, tmp_path)


def _one_group() -> None:
    from datetime import timedelta

    world = torch.distributed.group.WORLD
    assert len(guard.group_names()) == 1
    assert guard.group_timeout(world, "cpu") == timedelta(minutes=30)
    assert guard.group_timeout(world, "xpu") is None
    times = [time.time_ns()]
    for _ in range(2):
        torch.distributed.all_reduce(torch.ones(1))
        times.append(time.time_ns())
    first, last = guard.flight_record()[-2:]  # in the order of their start
    assert (last["profiling_name"], last["is_p2p"]) == ("gloo:all_reduce", False)
    assert times[0] <= first["time_created_ns"] <= times[1] <= last["time_created_ns"] <= times[2]


def test_process_groups(tmp_path: Path) -> None:
    """Where ranks wait, and for how long: without it mismatches in torch's own collectives are not found."""
    _in_a_group(_one_group, tmp_path)


def test_hooks_of_parameters_are_seen() -> None:
    """Setup under FSDP would lose them."""
    one, two = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    assert not sharding.has_hooks(one)
    one.register_hook(lambda grad: grad)
    two.register_post_accumulate_grad_hook(lambda p: None)
    assert sharding.has_hooks(one)
    assert sharding.has_hooks(two)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9, of its own call
def test_a_place_in_a_file_is_what_torch_writes(tmp_path: Path) -> None:
    """Sharded checkpoints could not be read, by fabric or by `torch.distributed.checkpoint.load`."""
    from torch.distributed import checkpoint

    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    (place,) = checkpoint.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    size = (tmp_path / "__0_0.distcp").stat().st_size
    assert place == sharded.place_in_file("__0_0.distcp", 0, size)


def test_a_dtensor_has_one_chunk_on_a_rank() -> None:
    """Sharded checkpoints could not be written."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = DTensor.from_local(torch.ones(2, 3), DeviceMesh("cpu", [0]), [Shard(0)])
        chunk = sharded.chunk_of(tensor)
    finally:
        dist.destroy_process_group()
    assert (chunk.offsets, chunk.sizes) == ((0, 0), (2, 3))


def test_ddp_leaves_out_what_it_is_told_to() -> None:
    """Weights of other kinds (torchao's int8) would be sent at setup, which raises."""
    import torch.distributed as dist

    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    ddp.leave_out_of_ddp(module, ["0.weight", "0.bias"])
    assert getattr(module, ddp.NOT_AVERAGED) == ["0.weight", "0.bias"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replica = torch.nn.parallel.DistributedDataParallel(module)
    finally:
        dist.destroy_process_group()
    assert replica.parameters_to_ignore == {"0.weight", "0.bias"}


def test_loss_scales_show_their_optimizers_and_their_value() -> None:
    """Gradients that the loop unscaled would be unscaled twice; replicas whose scales differ would pass."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert replicas.loss_scale(scaler) is None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler.scale((weight * 2).sum()).backward()
    assert not precision.optimizer_states(scaler)
    scaler.unscale_(optimizer)
    assert precision.optimizer_states(scaler)[id(optimizer)]["stage"].name == "UNSCALED"
    assert replicas.loss_scale(scaler).item() == 4.0


def test_tensors_of_tensors_and_their_hooks_are_seen() -> None:
    """The replica check compares the inner tensors of quantised weights, and reports hooks that differ."""

    class Pair(torch.Tensor):
        def __tensor_flatten__(self) -> Any:
            return [], None

        @classmethod
        def __tensor_unflatten__(cls, *_: Any) -> Any:
            return None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return None

    weight = torch.nn.Parameter(torch.ones(1))
    assert replicas.is_traceable_wrapper_subclass(torch.Tensor._make_subclass(Pair, torch.ones(1)))
    assert not replicas.is_traceable_wrapper_subclass(weight)
    assert not replicas.has_backward_hooks(weight)
    weight.register_hook(lambda grad: grad)
    assert replicas.has_backward_hooks(weight)


def test_operations_are_hidden_from_dispatch_modes() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        with sharding.no_dispatch_modes():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counted.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counted.get_total_flops() == 16


def test_iterators_of_loaders_with_persistent_workers_have_their_attribute() -> None:
    """A loader would be refused for torch's own iterator."""
    loader = torch.utils.data.DataLoader(range(3))  # type: ignore[arg-type]
    assert vars(loader)[loaders.ITERATOR] is None


def test_frames_of_torch_have_these_names() -> None:
    """Hang reports would show torch's dispatch code instead of "backward" or the collective."""
    from torch.autograd import graph

    assert callable(getattr(graph, watchdog.BACKWARD_FUNCTION))
    root = str(Path(torch.__file__).parents[1])
    ops, library = watchdog.DISPATCH_FILES
    assert Path(root + ops).is_file()
    assert Path(root + library).is_dir()


def test_compiled_modules_have_this_class() -> None:
    """Profiles would have no rows for calls of compiled models."""
    assert type(torch.compile(torch.nn.Linear(1, 1), backend="eager")) is profile.compiled_module()


def test_optimizers_hold_their_hooks_under_these_names() -> None:
    """Under ZeRO-1 the hooks of a user's optimizer would run twice in a step."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert {*zero1.STEP_HOOKS} <= {*vars(optimizer)}
    optimizer.step = torch.compile(step := optimizer.step, backend="eager")  # type: ignore[method-assign]
    assert getattr(optimizer.step, zero1.UNCOMPILED) == step


def test_functions_that_fill_are_those_of_init() -> None:
    """`empty_init=True` would draw weights that are loaded afterwards."""
    assert [name for name in core.INIT_FILLS if not callable(getattr(torch.nn.init, name, None))] == []


def test_policies_of_torch_run_by_this_method() -> None:
    """`auto_wrap_policy=ModuleWrapPolicy(...)` would be refused."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    chosen = getattr(ModuleWrapPolicy({torch.nn.Linear}), sharding.POLICY_METHOD)(model, set(), {})
    assert [*chosen] == [model[0]]


def test_spectral_norms_have_these_classes() -> None:
    """A pipeline would not warn of what spectral norm does for each micro-batch."""
    old = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    new = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2))
    found = [*pipeline.forward_pre_hooks(old), *new.parametrizations["weight"]]
    assert [type(one).__name__ for one in found] == [*pipeline.SPECTRAL_NORMS]


def test_modules_without_memory_are_initialised_by_these_names() -> None:
    """Weights of attention would keep no values; copies of a parameter would lose that it is one."""
    public, private = deferred_init.RESET_METHODS
    assert hasattr(torch.nn.Linear, public)
    assert hasattr(torch.nn.MultiheadAttention, private)
    tensor = torch.ones(1).as_subclass(type("Other", (torch.Tensor,), {}))
    setattr(tensor, deferred_init.PARAMETER_MARK, True)
    assert isinstance(tensor, torch.nn.Parameter)


def test_hooks_of_modules_are_seen() -> None:
    """A pipeline would never run them; tensor parallel would not compare inputs of hooked modules."""
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = torch.nn.Linear(1, 1)
        assert not strategies.has_forward_hooks(module)
        getattr(module, register)(lambda *_: None)
        assert strategies.has_forward_hooks(module)
        assert not pipeline.has_module_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert pipeline.has_module_backward_hooks(module)


def test_layouts_and_memory_formats_are_named_as_descriptions_have_them() -> None:
    """Sharded checkpoints could not be read: their descriptions refer to these names."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    described = pickle.dumps(TensorProperties.create_from_tensor(torch.ones(1)), 2)
    assert b"_get_layout" in described
    assert b"_MEM_FORMAT_ENCODING" in described
    assert sharded.layout_of("torch.strided") is torch.strided
    assert sharded.memory_format_of(0).name == "TORCH_CONTIGUOUS_FORMAT"


def test_groups_have_names_and_requests_can_be_done():
    """fabric plan: without them no strategy runs on a process group without other ranks."""
    assert isinstance(plan.group_names(), dict)
    assert plan.finished([torch.ones(1)]).wait()


def without_other_ranks() -> None:
    rank = torch.distributed.get_rank()
    with batch_size.local_collectives():
        if rank:
            row = torch.full((2,), float(rank))
            torch.distributed.all_reduce(row)
            rows = torch.empty(2, 2)
            torch.distributed.all_gather([*rows], row)
            assert rows.tolist() == [[1.0, 1.0]] * 2
            tensors, _ = batch_size.kept_values([row])
            assert tensors[0] is row
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total == 2


def test_collectives_can_be_local(ranks: RankPool) -> None:
    """fabric.find_batch_size: ranks would wait for a rank that is out of memory."""
    ranks.run(without_other_ranks, world_size=2)


def as_an_accelerator() -> None:
    kept = plan.behave_as_accelerator()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = torch.ones(2, 2, dtype=torch.bfloat16)
        for name in plan.FP32[:3]:
            assert getattr(torch, name)(low).dtype is torch.float32
        assert torch.softmax(low, -1).dtype is torch.float32
        assert torch.nn.functional.layer_norm(low, (2,)).dtype is torch.float32
        assert (low @ low).dtype is torch.bfloat16
    assert "sum" in plan.FP32_OUT
    assert plan._in_float32("exp", False)(low).dtype is torch.float32
    with plan.FakeTensorMode():
        fake = torch.ones(2)
        with plan.unset_fake_temporarily():
            assert not isinstance(torch.ones(2), plan.FakeTensor)
    assert isinstance(fake, plan.FakeTensor)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    with torch.profiler.profile() as found:
        optimizer.step()
    assert "aten::_foreach_sqrt" in {event.name for event in found.events()}
    entered = []

    @contextmanager
    def context():
        entered.append(True)
        yield

    plan.around_propagation(context)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    assert (distribute_tensor(torch.ones(4), mesh) + 1).shape == (4,)
    assert entered
    del kept


def test_the_host_behaves_as_an_accelerator():
    """fabric plan: else peaks of optimizers and of mixed precision are those of the CPU."""
    with RankPool(1) as pool:  # whose process ends with the patches
        pool.run(as_an_accelerator, world_size=1)


def test_a_dispatch_mode_receives_each_operation():
    """Run report: without it there are no FLOP/s and no MFU."""
    names = []

    class Names(report.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    with Names():
        torch.ones(2, 2).mm(torch.ones(2, 2))
    assert names[-1] == "aten.mm"
