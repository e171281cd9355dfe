"""Private names of torch: each is there and does what is needed of it; the docstring says what breaks."""

from __future__ import annotations

import copy
import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fabric.core import torch_internals as internals
from fabric.core.torch_versions import collectives_recorded
from fabric.data import _torch as loaders

if TYPE_CHECKING:
    from collections.abc import Callable


def test_each_name_has_a_test() -> None:
    """A name that nobody looks at would break in a user's run."""
    tested = Path(__file__).read_text(encoding="utf-8")
    found = {}
    for file, prefix in ((internals.__file__, "internals"), (loaders.__file__, "loaders")):
        source = Path(file).read_text(encoding="utf-8")
        found[prefix] = re.findall(r"^(?:def )?([A-Za-z]\w*)(?=\(|, | = |: )", source, re.MULTILINE)
        assert [name for name in found[prefix] if f"{prefix}.{name}" not in tested] == []
    assert {"BatchNorm", "hang", "will_run", "COUNTED_STEP"} <= {*found["internals"]}
    assert {"pin_memory", "drop_workers"} <= {*found["loaders"]}


def test_batch_norm_is_the_class_of_all_batch_norms() -> None:
    """Warnings of statistics that differ between ranks, and what FSDP keeps in single precision."""
    for kind in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm):
        assert issubclass(kind, internals.BatchNorm)
    assert not issubclass(torch.nn.LayerNorm, internals.BatchNorm)


def test_dropout_is_the_class_of_all_dropouts() -> None:
    """`fabric check` compares gradients without it."""
    for kind in (torch.nn.Dropout, torch.nn.Dropout2d, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout):
        assert issubclass(kind, internals.Dropout)


def test_the_operation_behind_item() -> None:
    """`p.norm().item()` of a part would be this rank's, without a word."""
    assert internals.value_of(torch.tensor(2.5)) == 2.5


def test_passes_have_numbers_that_grow_and_calls_run_at_their_end() -> None:
    """Gradients and buffers are synchronised at the end of the outermost pass, once."""
    seen: list[object] = []

    def hook(grad: torch.Tensor) -> None:
        seen.append(internals.backward_pass())
        internals.call_after_backward(lambda: seen.append(weight.grad is not None))

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    assert internals.backward_pass() == -1
    (weight * 2).sum().backward()
    (weight * 2).sum().backward()
    first, ended, second, ended_too = seen
    assert ended is ended_too is True
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert 0 <= first < second
    assert internals.backward_pass() == -1


def test_a_clip_is_seen_before_it_changes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own clip of gradients that carry the loss scale would go unseen, and nothing be trained."""
    module, seen = torch.nn.utils.clip_grad, []
    name = "_group_tensors_by_device_and_dtype"
    monkeypatch.setattr(module, name, getattr(module, name))
    internals.before_clips(lambda grads: seen.append([grad.tolist() for grad in grads]))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([3.0])
    torch.nn.utils.clip_grad_norm_([weight], 2.0)
    torch.nn.utils.clip_grad_value_([weight], 1.0)
    assert seen[0] == [[3.0]]
    assert torch.tensor(seen[-1]).allclose(torch.tensor(2.0))
    assert weight.grad.tolist() == [1.0]


def test_gradients_are_written_by_a_node_that_conversions_replace() -> None:
    """A model that was converted after setup is an error: DDP's reducer hooks the nodes of setup."""
    weight = torch.nn.Parameter(torch.ones(1))
    first = internals.accumulator_of(weight)
    seen: list[object] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(internals.running_node()))
    (weight * 2).sum().backward()
    weight.data = weight.data.double()
    weight.data = weight.data.float()
    weight.grad = None
    (weight * 2).sum().backward()
    assert [node is first for node in seen] == [True, False]
    assert internals.running_node() is None


def test_tensors_of_weak_references_stay_usable() -> None:
    """Frozen and moved parameters are held weakly; torch 2.9 would lose those that C++ alone holds."""
    holder = torch.nn.Linear(1, 1)
    ref = weakref.ref(holder.weight)
    assert internals.tensor_of(ref) is holder.weight
    del holder
    assert internals.tensor_of(ref) is None


def test_operations_on_lists_are_those_of_their_names() -> None:
    """Clipping, packing of gradients and their means: one kernel for many tensors."""
    lists = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in internals.foreach_norm(lists, 2.0)] == [5.0, 2.0]
    internals.foreach_mul_(lists, 2.0)
    internals.foreach_div_(lists, 4.0)
    assert [t.tolist() for t in lists] == [[1.5, 2.0], [1.0]]
    internals.foreach_copy_(lists, [torch.zeros(2), torch.ones(1)])
    assert [t.tolist() for t in lists] == [[0.0, 0.0], [1.0]]


def test_nodes_that_the_pass_that_runs_comes_to() -> None:
    """A plain `loss.backward()` past `fabric.backward` is refused, `torch.autograd.grad` is not."""
    seen: list[bool] = []
    used, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    edges = [torch.autograd.graph.get_gradient_edge(weight) for weight in (used, other)]
    out = used * 2 + other
    out.register_hook(lambda grad: seen.extend([internals.will_run(edge.node) for edge in edges]))
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
    assert internals.is_custom_function_input(Same.apply(base))
    assert not internals.is_custom_function_input(base[:2])


def test_schedulers_hear_of_steps_that_the_scaler_skips() -> None:
    """Under 16-mixed the first steps may be skipped: the scheduler would warn (an error here)."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert not hasattr(optimizer.step, internals.COUNTED_STEP)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, internals.COUNTED_STEP)
    setattr(optimizer, internals.STEPPED, True)
    scheduler.step()


def test_modules_hold_their_tables_under_these_names() -> None:
    """`register_buffer`, `functional_call` and state dict hooks on a set-up model are the user's module's."""
    assert {*internals.MODULE_TABLES, *internals.CALL_TABLES} <= {*vars(torch.nn.Module())}


def test_hooks_on_saved_tensors_are_seen() -> None:
    """ContextParallel would keep what activations that are computed again must not keep, or the other way."""
    assert not internals.packs_saved_tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert internals.packs_saved_tensors()


def test_passes_that_accumulate_are_told_from_those_that_do_not() -> None:
    """`torch.autograd.grad` through a pipeline would add to `.grad` of its stages' parameters."""
    seen: list[bool] = []
    weight = torch.ones(1, requires_grad=True)
    for run in (torch.autograd.backward, lambda loss: torch.autograd.grad(loss, [weight])):
        middle = weight * 2
        middle.register_hook(lambda grad: seen.append(internals.accumulates()))
        run((middle * 3).sum())
    assert seen == [True, False]


def test_passes_that_keep_the_graph_are_told_from_those_that_do_not() -> None:
    """A pipeline's stages would let go of what a second backward needs, or hold it for ever."""
    seen: list[bool] = []
    middle = torch.ones(1, requires_grad=True) * 2
    middle.register_hook(lambda grad: seen.append(internals.keeps_graph()))
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
    states = internals.groups_inside(model)
    assert len(states) == 2
    assert internals.groups_inside(model[0]) == []
    called: list[object] = []
    model[0].forward = lambda x: called.append(type(model[0].weight.data).__name__) or x  # type: ignore[assignment]
    with internals.ungathered(states) as dtype:
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
        seen.append(internals.in_function_transform())
        return x.sum()

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True, True]


def test_views_have_the_number_of_their_memory() -> None:
    """Tied weights are gathered once; parts on the meta device find the tensor that they are parts of."""
    for device in ("cpu", "meta"):
        one, other = torch.ones(4, device=device), torch.ones(4, device=device)
        assert internals.memory_of(one[2:]) == internals.memory_of(one) != internals.memory_of(other)


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
        states = internals.fsdp_states(model)
        groups = internals.fsdp_groups(states)
        weight: torch.Tensor = model[0].weight
        return [
            internals.is_fsdp(model) and not internals.is_fsdp(model[1]),
            all(vars(part)[mark] for part in model.modules() for mark in internals.FSDP_MARKS),
            internals.fsdp_state(model) in states,
            len(states) == 2 and [len(group.fsdp_params) for group in groups] == [2, 2],
            isinstance(weight, DTensor)
            and internals.memory_of(weight) == internals.memory_of(weight.to_local()),
            torch.ops.aten.is_same_size.default in internals.dtensor_handlers(),
        ]
    finally:
        dist.destroy_process_group()


def test_fsdp_and_dtensors_show_what_they_are_made_of() -> None:
    """Parts are those of the optimizer between calls; numbers and draws of DTensors are those of one rank."""
    assert _look_into_fsdp() == [True] * 6


def test_tensors_flatten_into_one() -> None:
    """Small leaves of a tree travel in one message, gradients in one bucket."""
    flat = internals.flatten_tensors([torch.ones(2, 1), torch.zeros(1)])
    assert flat.tolist() == [1.0, 1.0, 0.0]


def test_tensor_classes_are_not_asked() -> None:
    """What reads a stored tensor would be asked for all of it."""

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    tensor = torch.ones(2).as_subclass(Asked)
    with internals.no_subclass_functions():
        assert (tensor + 1).sum().item() == 4


def test_operations_say_what_they_change_and_run_without_the_class() -> None:
    """Parameters without memory record what changes them, and would be asked about it without end."""
    seen: list[object] = []

    class Recorded(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append([t.shape for t in internals.written_by(func, args, kwargs or {})])
            with internals.no_subclass_dispatch():
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
    found = [internals.goes_on(running)]
    for _ in running:
        found.append(internals.goes_on(running))
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


def _in_a_group(call: Callable[[], None], tmp_path: Path) -> None:
    """In a process of its own, the only rank of a group."""
    torch.multiprocessing.spawn(_as_rank, (str(tmp_path / "store"), call))


def _as_rank(rank: int, path: str, call: Callable[[], None]) -> None:
    with collectives_recorded():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(path, 1), rank=0, world_size=1
        )
    call()


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
    internals.disarm(replica.reducer)
    armed.backward()
    assert not seen
    replica(False).backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        internals.check_reduced(replica)
    internals.renew_reducer(replica, [*replica.parameters()])
    for turn in (1, 2):
        replica(True).backward()
        internals.check_reduced(replica)
        if not internals.has_built_buckets(replica):
            internals.build_buckets(replica)
        assert len(seen) == turn
    assert internals.has_built_buckets(replica)
    twin = copy.deepcopy(replica)
    internals.hook_again(twin)
    twin(True).backward()
    assert [len(state) for _, state in twin._comm_hooks] == [3]
    assert len(seen) == 2
    used, rest = replica.module.used, replica.module.rest
    internals.leave_out(replica, {rest}, [used])
    replica(False).backward()
    internals.check_reduced(replica)  # waits for `used` alone
    internals.leave_out(replica, {used, rest}, [])
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
    internals.begin_fsdp(model)
    internals.expect_thawed(model)
    state = internals.fsdp_state(model[1])
    (group,) = internals.fsdp_groups([state])
    weight = group.fsdp_params[0]
    assert internals.is_fsdp(model[1])
    assert len(internals.fsdp_states(model)) == 3
    assert internals.computes_in(model[1]) is torch.bfloat16
    assert (internals.owner_of(weight).module, internals.owner_of(weight).param_name) == (model[1], "weight")
    assert internals.whole_of(weight) is None
    assert internals.phase(state) == "IDLE"
    hung: list[object] = []
    internals.hang_in_place(state, lambda out: internals.hang(state, hung.append(out) or out))
    seen: list[object] = []
    look = lambda *_: seen.extend([internals.phase(state), internals.in_forward(state)])  # noqa: E731
    model[1].register_forward_pre_hook(look)
    out = model(torch.ones(1, 2))
    assert seen == ["FORWARD", True]
    assert len(hung) == 1
    assert not internals.in_forward(state)
    assert internals.is_gathered_ahead(group) is False
    group.unshard(async_op=True)
    group.reshard()
    model[0].requires_grad_(True)
    out.sum().backward()
    assert weight.sharded_param.grad is not None
    assert internals.whole_of(weight) is not None
    weight.sharded_param.grad = None
    whole = internals.whole_of(weight)
    whole.grad = torch.ones_like(whole, dtype=getattr(whole, "grad_dtype", None))
    root = internals.fsdp_state(model)
    reduced: list[int] = []
    internals.reduce_in_place(model, lambda reduce, parts: reduced.append(len(parts)) or reduce())
    internals.finish_backward(root)
    assert sorted(reduced) == sorted(
        len(g.fsdp_params) for g in internals.fsdp_groups(internals.fsdp_states(model))
    )
    assert internals.whole_of(weight).grad is None
    assert weight.sharded_param.grad is not None
    internals.gather_root(root, model)
    internals.free_root(root, model, torch.ones(1, requires_grad=True) * 2)
    group.unshard()
    group.wait_for_unshard()
    assert model[1].weight is internals.whole_of(weight)
    internals.show_part(weight)
    assert model[1].weight is weight.sharded_param
    assert internals.fsdp_root(model[1]) is model
    other = torch.nn.Sequential(model[1], torch.nn.Linear(2, 2))
    fully_shard(other)
    assert internals.fsdp_root(other) is None
    internals.begin_fsdp(other)  # the group of `model[1]` keeps its root
    assert internals.fsdp_root(other) is other
    assert internals.fsdp_root(model[1]) is model
    assert len(internals.fsdp_states(other)) == 1
    internals.stay_gathered(internals.fsdp_state(model[1]))
    group.unshard()
    model.state_dict()
    group.reshard_after_forward = None
    assert group._sharded_state.name == "UNSHARDED"


def test_groups_and_parts_of_fsdp(tmp_path: Path) -> None:
    """Calls of methods and layers, calls that fail, nested backwards: `layouts/gathered.py`."""
    _in_a_group(_one_split_model, tmp_path)


def _one_group() -> None:
    from datetime import timedelta

    world = torch.distributed.group.WORLD
    assert len(internals.group_names()) == 1
    assert internals.group_timeout(world, "cpu") == timedelta(minutes=30)
    assert internals.group_timeout(world, "xpu") is None
    torch.distributed.all_reduce(torch.ones(1))
    last = internals.flight_record()[-1]
    assert (last["profiling_name"], last["is_p2p"]) == ("gloo:all_reduce", False)


def test_process_groups(tmp_path: Path) -> None:
    """Where ranks wait, and for how long: without it mismatches in torch's own collectives are not found."""
    _in_a_group(_one_group, tmp_path)


def test_hooks_of_parameters_are_seen() -> None:
    """Setup under FSDP would lose them."""
    one, two = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    assert not internals.has_hooks(one)
    one.register_hook(lambda grad: grad)
    two.register_post_accumulate_grad_hook(lambda p: None)
    assert internals.has_hooks(one)
    assert internals.has_hooks(two)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9, of its own call
def test_a_place_in_a_file_is_what_torch_writes(tmp_path: Path) -> None:
    """Sharded checkpoints could not be read, by fabric or by `torch.distributed.checkpoint.load`."""
    from torch.distributed import checkpoint

    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    (place,) = checkpoint.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    size = (tmp_path / "__0_0.distcp").stat().st_size
    assert place == internals.place_in_file("__0_0.distcp", 0, size)


def test_ddp_leaves_out_what_it_is_told_to() -> None:
    """Weights of other kinds (torchao's int8) would be sent at setup, which raises."""
    import torch.distributed as dist

    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    internals.leave_out_of_ddp(module, ["0.weight", "0.bias"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replica = torch.nn.parallel.DistributedDataParallel(module)
    finally:
        dist.destroy_process_group()
    assert replica.parameters_to_ignore == {"0.weight", "0.bias"}
