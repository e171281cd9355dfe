"""The compatible surface: names, parameters and defaults that a loop written for Lightning Fabric may use."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple

import pytest

# Per module one symbol a line, `name(parameters) < base`, its members below; one without parentheses is read
# without a call. `...` is any default. A line that ends inside parentheses goes on in the next.
PUBLIC = {
    "fabric": """
Fabric(*, accelerator='auto', strategy='auto', devices='auto', num_nodes=1, precision=None,
        plugins=None, callbacks=None, loggers=None)
    .accelerator
    .strategy
    .device
    .global_rank
    .local_rank
    .node_rank
    .world_size
    .is_global_zero
    .loggers
    .logger
    .run(*args, **kwargs)
    .setup(module, *optimizers, scheduler=None, move_to_device=True, _reapply_compile=True)
    .setup_module(module, move_to_device=True, _reapply_compile=True)
    .setup_optimizers(*optimizers)
    .setup_dataloaders(*dataloaders, use_distributed_sampler=True, move_to_device=True)
    .backward(tensor, *args, model=None, **kwargs)
    .clip_gradients(module, optimizer, clip_val=None, max_norm=None, norm_type=2.0, error_if_nonfinite=True)
    .normalize_gradients(module, num_items, *, optimizer=None)
    .autocast()
    .find_batch_size(step, *, start=8, global_batch)
    .to_device(obj)
    .print(*args, **kwargs)
    .progress(batches, desc=None, *, show=None, **settings)
    .profile(folder, *, ranks=None, wait=1, warmup=1, active=3, **settings)
    .barrier(name=None)
    .should_stop()
    .rng_state()
    .broadcast(obj, src=0, *, group=None)
    .all_gather(data, group=None, sync_grads=False, *, uneven='error', async_op=False)
    .all_reduce(data, group=None, reduce_op='mean', *, inplace=True, sync_grads=False, async_op=False)
    .reduce_scatter(data, reduce_op='mean', group=None, *, sync_grads=False)
    .all_to_all(data, group=None, *, sync_grads=False)
    .gather(data, dst=0, group=None)
    .scatter(data, src=0, group=None)
    .all_gather_object(obj, group=None)
    .any(flag)
    .all(flag)
    .agree(value)
    .compute_metrics(metrics)
    .rank_zero_first(local=False)
    .no_backward_sync(module, enabled=True)
    .sharded_model()
    .init_tensor()
    .init_module(empty_init=None)
    .save(path, state, filter=None)
    .load(path, state=None, strict=True, *, weights_only=None)
    .load_raw(path, obj, strict=True, *, weights_only=None)
    .launch(function=..., *args, **kwargs)
    .call(hook_name, *args, **kwargs)
    .log(name, value, step=None, *, sync_dist=False, reduce_fx='mean')
    .log_dict(metrics, step=None, *, sync_dist=False, reduce_fx='mean')
    .seed_everything(seed=None, workers=None, verbose=True)
is_wrapped(obj)
seed_everything(seed=None, workers=False, verbose=True)
""",
    "fabric.strategies": """
DataParallelStrategy(accelerator=None, parallel_devices=None, checkpoint_io=None,
        precision=None) < ParallelStrategy
DDP2Strategy < DDPStrategy
DDPStrategy(accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None,
        precision=None, process_group_backend=None, timeout=timedelta(seconds=1800),
        start_method='popen', **kwargs) < ParallelStrategy
    .num_nodes
    .num_processes
    .process_group_backend
ParallelStrategy(accelerator=None, parallel_devices=None, cluster_environment=None,
        checkpoint_io=None, precision=None) < Strategy
    .global_rank
    .local_rank
    .node_rank
    .world_size
    .parallel_devices
    .distributed_sampler_kwargs
SingleDeviceStrategy(device='cpu', accelerator=None, checkpoint_io=None, precision=None) < Strategy
ZeRO1Strategy(accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None,
        precision=None, process_group_backend=None, timeout=timedelta(seconds=1800),
        start_method='popen', **kwargs) < DDPStrategy
Strategy(accelerator=None, checkpoint_io=None, precision=None)
    .root_device
    .is_global_zero
    .launcher
    .accelerator
    .checkpoint_io
    .precision
    .setup_environment()
    .process_dataloader(dataloader)
    .tensor_init_context()
    .module_init_context(empty_init=None)
    .setup_module_and_optimizers(module, optimizers, scheduler=None)
    .setup_module(module)
    .setup_optimizer(optimizer)
    .module_to_device(module)
    .batch_to_device(batch, device=None)
    .backward(tensor, module, *args, **kwargs)
    .optimizer_step(optimizer, **kwargs)
    .all_gather(tensor, group=None, sync_grads=False)
    .all_reduce(tensor, group=None, reduce_op='mean')
    .barrier(name=None)
    .broadcast(obj, src=0)
    .reduce_boolean_decision(decision, all=True)
    .save_checkpoint(path, state, storage_options=None, filter=None)
    .get_module_state_dict(module)
    .load_module_state_dict(module, state_dict, strict=True)
    .get_optimizer_state(optimizer)
    .load_checkpoint(path, state=None, strict=True, weights_only=None)
    .teardown()
    .clip_gradients_norm(module, optimizer, max_norm, norm_type=2.0, error_if_nonfinite=True)
    .clip_gradients_value(module, optimizer, clip_val)
    .register_strategies(strategy_registry)
STRATEGY_REGISTRY
""",
    "fabric.accelerators": """
Accelerator
    .setup_device(device)
    .teardown()
    .parse_devices(devices)
    .get_parallel_devices(devices)
    .auto_device_count()
    .is_available()
    .name()
    .register_accelerators(accelerator_registry)
ACCELERATOR_REGISTRY
CPUAccelerator < Accelerator
CUDAAccelerator < Accelerator
find_usable_cuda_devices(num_devices=-1)
MPSAccelerator < Accelerator
""",
    "fabric.plugins": """
CheckpointIO
    .save_checkpoint(checkpoint, path, storage_options=None)
    .load_checkpoint(path, map_location=None, weights_only=None)
    .remove_checkpoint(path)
    .teardown()
ClusterEnvironment
    .creates_processes_externally
    .main_address
    .main_port
    .detect()
    .world_size()
    .set_world_size(size)
    .global_rank()
    .set_global_rank(rank)
    .local_rank()
    .node_rank()
    .validate_settings(num_devices, num_nodes)
    .teardown()
DoublePrecision < Precision
    .convert_module(module)
    .tensor_init_context()
    .module_init_context()
    .forward_context()
    .convert_input(data)
    .convert_output(data)
HalfPrecision(precision='16-true') < Precision
    .convert_module(module)
    .tensor_init_context()
    .module_init_context()
    .forward_context()
    .convert_input(data)
    .convert_output(data)
MixedPrecision(precision, device, scaler=None) < Precision
Precision
    .convert_module(module)
    .tensor_init_context()
    .module_init_context()
    .forward_context()
    .convert_input(data)
    .convert_output(data)
    .pre_backward(tensor, module)
    .backward(tensor, model, *args, **kwargs)
    .post_backward(tensor, module)
    .optimizer_step(optimizer, **kwargs)
    .main_params(optimizer)
    .unscale_gradients(optimizer)
    .state_dict()
    .load_state_dict(state_dict)
    .teardown()
TorchCheckpointIO < CheckpointIO
    .save_checkpoint(checkpoint, path, storage_options=None)
    .load_checkpoint(path, map_location=..., weights_only=None)
    .remove_checkpoint(path)
""",
    "fabric.plugins.precision": """
DoublePrecision
HalfPrecision
MixedPrecision
Precision
""",
    "fabric.plugins.environments": """
ClusterEnvironment
KubeflowEnvironment < ClusterEnvironment
LightningEnvironment() < ClusterEnvironment
LSFEnvironment() < ClusterEnvironment
MPIEnvironment() < ClusterEnvironment
SLURMEnvironment(auto_requeue=True, requeue_signal=None) < ClusterEnvironment
    .job_name()
    .job_id()
    .resolve_root_node_address(nodes)
TorchElasticEnvironment < ClusterEnvironment
""",
    "fabric.plugins.collectives": """
Collective()
    .rank
    .world_size
    .group
    .broadcast(tensor, src)
    .all_reduce(tensor, op)
    .reduce(tensor, dst, op)
    .all_gather(tensor_list, tensor)
    .gather(tensor, gather_list, dst=0)
    .scatter(tensor, scatter_list, src=0)
    .reduce_scatter(output, input_list, op)
    .all_to_all(output_tensor_list, input_tensor_list)
    .send(tensor, dst, tag=0)
    .recv(tensor, src=None, tag=0)
    .barrier(device_ids=None)
    .is_available()
    .is_initialized()
    .init_group(**kwargs)
    .new_group(**kwargs)
    .destroy_group(group)
    .setup(**kwargs)
    .create_group(**kwargs)
    .teardown()
SingleDeviceCollective() < Collective
TorchCollective() < Collective
    .all_gather_object(object_list, obj)
    .broadcast_object_list(object_list, src, device=None)
    .gather_object(obj, object_gather_list, dst=0)
    .scatter_object_list(scatter_object_output_list, scatter_object_input_list, src=0)
    .monitored_barrier(timeout=None, wait_all_ranks=False)
""",
    "fabric.plugins.io": """
CheckpointIO
TorchCheckpointIO
""",
    "fabric.loggers": """
CSVLogger(root_dir, name='lightning_logs', version=None, prefix='', flush_logs_every_n_steps=100) < Logger
    .experiment
Logger
    .name
    .version
    .root_dir
    .log_dir
    .group_separator
    .log_metrics(metrics, step=None)
    .log_hyperparams(params, *args, **kwargs)
    .log_graph(model, input_array=None)
    .log_artifact(path, name=None)
    .save()
    .finalize(status)
MLFlowLogger(experiment_name='lightning_logs', run_name=None, tracking_uri=None, tags=None,
        save_dir='./mlruns', prefix='', run_id=None) < Logger
    .experiment
WandbLogger(name=None, save_dir='.', version=None, offline=None, project=None, prefix='', **kwargs) < Logger
    .experiment
TensorBoardLogger(root_dir, name='lightning_logs', version=None, default_hp_metric=True, prefix='',
        sub_dir=None, **kwargs) < Logger
    .sub_dir
    .experiment
""",
    "fabric.wrappers": """
_unwrap_objects(collection)
_FabricDataLoader(dataloader, device=None)
    .device
_FabricModule(forward_module, strategy, original_module=None)
    .module
    .state_dict(*args, prefix='', **kwargs)
    .load_state_dict(state_dict, strict=True, **kwargs)
    .mark_forward_method(method)
_FabricOptimizer(optimizer, strategy, callbacks=None)
    .optimizer
    .state_dict()
    .load_state_dict(state_dict)
    .step(closure=None)
is_wrapped(obj)
""",
    "fabric.utilities": """
AttributeDict
disable_possible_user_warnings(module='')
is_shared_filesystem(strategy, path=None, timeout=3)
LightningEnum
    .from_str(value, source='key')
    .try_from_str(value, source='key')
measure_flops(model, forward_fn, loss_fn=None)
move_data_to_device(batch, device)
rank_zero_deprecation(message, stacklevel=5, **kwargs)
rank_zero_info(*args, stacklevel=4, **kwargs)
rank_zero_only(fn, default=None)
rank_zero_warn(message, stacklevel=4, **kwargs)
suggested_max_num_workers(local_world_size)
Throughput(available_flops=None, world_size=1, window_size=100, separator='/',
        using_sparse_model=None, sparse_cuda_acceleration_factor=2.0)
    .update(*, time, batches, samples, lengths=None, flops=None)
    .compute()
    .reset()
ThroughputMonitor(fabric, **kwargs) < Throughput
    .compute_and_log(step=None, **kwargs)
""",
    "fabric.utilities.seed": """
pl_worker_init_function(worker_id, rank=None)
reset_seed()
seed_everything(seed=None, workers=False, verbose=True)
""",
    "fabric.utilities.data": """
AttributeDict
has_iterable_dataset(dataloader)
has_len(dataloader)
suggested_max_num_workers(local_world_size)
""",
    "fabric.utilities.throughput": """
get_available_flops(device, dtype)
measure_flops(model, forward_fn, loss_fn=None)
Throughput
ThroughputMonitor
""",
    "fabric.utilities.apply_func": """
convert_tensors_to_scalars(data)
convert_to_tensors(data, device)
move_data_to_device(batch, device)
""",
    "fabric.utilities.cloud_io": """
get_filesystem(path, **kwargs)
""",
    "fabric.utilities.distributed": """
DistributedSamplerWrapper(sampler, *args, **kwargs)
    .set_epoch(epoch)
""",
    "fabric.utilities.spike": """
SpikeDetection(mode='min', window=10, warmup=1, atol=None, rtol=2.0, exclude_batches_path=None,
        finite_only=True)
    .on_train_batch_end(fabric, loss, batch, batch_idx)
    .state_dict()
    .load_state_dict(state_dict)
TrainingSpikeException(batch_idx, *args, **kwargs)
""",
    "fabric.utilities.rank_zero": """
LightningDeprecationWarning
""",
    "fabric.utilities.warnings": """
disable_possible_user_warnings(module='')
PossibleUserWarning
""",
    "fabric.utilities.exceptions": """
MisconfigurationException
""",
    "fabric.utilities.types": """
Optimizable < Steppable
    .state_dict()
    .load_state_dict(state_dict)
ReduceOp
""",
}

STRATEGIES = [
    "ddp",
    "ddp2",
    "ddp_find_unused_parameters_true",
    "ddp_find_unused_parameters_true_fork",
    "ddp_find_unused_parameters_true_notebook",
    "ddp_find_unused_parameters_true_spawn",
    "ddp_fork",
    "ddp_notebook",
    "ddp_spawn",
    "dp",
    "single_device",
    "zero1",
]
ACCELERATORS = ["cpu", "cuda", "mps"]
PACKAGES = [
    "fabric",
    "fabric.accelerators",
    "fabric.loggers",
    "fabric.plugins",
    "fabric.plugins.collectives",
    "fabric.plugins.environments",
    "fabric.plugins.io",
    "fabric.plugins.precision",
    "fabric.strategies",
    "fabric.testing",
    "fabric.utilities",
]


class Symbol(NamedTuple):
    """One line of PUBLIC."""

    module: str
    owner: str
    """The class, for a member."""
    name: str
    parameters: str
    """Text in parentheses, parentheses included; empty where only the name counts."""
    base: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


def symbols() -> Iterator[Symbol]:
    for module, table in PUBLIC.items():
        owner = ""
        for line in logical_lines(table):
            text, _, base = line.strip().partition(" < ")
            name, bracket, rest = text.removeprefix(".").partition("(")
            member = text.startswith(".")
            yield Symbol(module, owner if member else "", name, bracket + rest, base)
            owner = owner if member else name


def logical_lines(table: str) -> Iterator[str]:
    whole = ""
    for line in filter(None, table.splitlines()):
        whole += f" {line.strip()}" if whole else line
        if whole.count("(") == whole.count(")"):
            yield whole
            whole = ""


def resolve(symbol: Symbol) -> tuple[Any, Any]:
    """The object, and what stands in the class's own dictionary for a member."""
    module = import_module(symbol.module)
    if not symbol.owner:
        found = getattr(module, symbol.name)
        return found, found
    owner = getattr(module, symbol.owner)
    return getattr(owner, symbol.name, None), inspect.getattr_static(owner, symbol.name)


SYMBOLS = list(symbols())


@pytest.mark.parametrize("symbol", [s for s in SYMBOLS if not s.owner or s.parameters], ids=str)
def test_symbol(symbol):
    found, static = resolve(symbol)
    if symbol.base:
        assert symbol.base in [kind.__name__ for kind in found.__mro__]
    if symbol.parameters:
        bound = not symbol.owner or isinstance(static, classmethod | staticmethod)
        parameters = list(inspect.signature(found).parameters.values())
        assert missing(symbol.parameters, parameters if bound else parameters[1:]) == []


@pytest.mark.parametrize("symbol", [s for s in SYMBOLS if s.owner and not s.parameters], ids=str)
def test_property(symbol):
    owner = getattr(import_module(symbol.module), symbol.owner)
    static = inspect.getattr_static(owner, symbol.name, None)
    assert not inspect.isroutine(static), f"{symbol} is a method: it must be readable without a call"
    assert static is not None or is_set_on_instances(owner, symbol.name), f"{symbol} does not exist"


def is_set_on_instances(owner: type, name: str) -> bool:
    own = [kind for kind in owner.__mro__ if kind.__module__.startswith("fabric")]
    return any(f"self.{name} = " in inspect.getsource(kind) for kind in own)


def missing(wanted: str, ours: list[inspect.Parameter]) -> list[str]:
    """What a call written for `wanted` would miss in `ours`; what ours has more must be keyword-only."""
    theirs = ast.parse(f"def f{wanted}: ...").body[0].args
    positional = [parameter for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    found = []
    if [parameter.name for parameter in positional] != [arg.arg for arg in theirs.args]:
        found.append(f"positional: {[parameter.name for parameter in positional]}")
    kinds = {parameter.kind for parameter in ours}
    if theirs.vararg and inspect.Parameter.VAR_POSITIONAL not in kinds:
        found.append(f"*{theirs.vararg.arg}")
    if theirs.kwarg and inspect.Parameter.VAR_KEYWORD not in kinds:
        found.append(f"**{theirs.kwarg.arg}")
    defaults = {parameter.name: parameter.default for parameter in ours}
    for name, default in default_values(theirs).items():
        if name not in defaults:
            found.append(f"{name} is missing")
        elif not same_default(defaults[name], default):
            found.append(f"{name} has the default {defaults[name]!r}")
    return found


def default_values(arguments: ast.arguments) -> dict[str, Any]:
    """Parameter name to default, `Parameter.empty` where there is none."""
    empty = inspect.Parameter.empty
    without = len(arguments.args) - len(arguments.defaults)
    nodes = dict(zip([arg.arg for arg in arguments.args], [None] * without + arguments.defaults, strict=True))
    nodes |= dict(zip([arg.arg for arg in arguments.kwonlyargs], arguments.kw_defaults, strict=True))
    names = {"timedelta": timedelta}
    return {name: empty if node is None else eval(ast.unparse(node), names) for name, node in nodes.items()}


def same_default(ours: Any, theirs: Any) -> bool:
    if theirs is inspect.Parameter.empty:
        return True  # a default where they had none harms no caller
    if theirs is ...:
        return ours is not inspect.Parameter.empty
    return type(ours) is type(theirs) and ours == theirs


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_complete(package):
    module = import_module(package)
    assert module.__all__ == sorted(module.__all__, key=isort_key)
    assert dir(module) == sorted(module.__all__), "the lazy table and __all__ differ"
    wanted = {symbol.name for symbol in SYMBOLS if symbol.module == package and not symbol.owner}
    assert wanted <= set(module.__all__)


def isort_key(name: str) -> tuple[int, str]:
    """ruff's order: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PACKAGES for name in import_module(package).__all__]
)
def test_every_name_of_all_resolves(package, name):
    assert getattr(import_module(package), name) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="it offers"):
        _ = import_module(package).no_such_name


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_names(name):
    registry = import_module("fabric.strategies").STRATEGY_REGISTRY
    assert name in registry.available_strategies()


@pytest.mark.parametrize("name", ACCELERATORS)
def test_accelerator_names(name):
    registry = import_module("fabric.accelerators").ACCELERATOR_REGISTRY
    assert name in registry.available_accelerators()


@pytest.mark.parametrize(
    ("ours", "gap"),
    [
        ("def f(a, b=1): ...", []),
        ("def f(a, b=1, *, extra=None): ...", []),
        ("def f(b=1, a=2): ...", ["positional"]),
        ("def f(a, b=True): ...", ["b has the default True"]),
        ("def f(a, b=1, extra=None): ...", ["positional"]),
        ("def f(a, *, b=1): ...", ["positional"]),
        ("def f(a): ...", ["positional", "b is missing"]),
    ],
)
def test_the_comparison_itself(ours, gap):
    space: dict[str, Any] = {}
    exec(ours, space)
    found = missing("(a, b=1)", list(inspect.signature(space["f"]).parameters.values()))
    assert [text.startswith(start) for text, start in zip(found, gap, strict=True)] == [True] * len(gap)
