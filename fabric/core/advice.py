"""Advice for names of other libraries and for arguments of the wrong kind. Loaded at the first such error."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.messages import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabric.core.errors import FabricError

# fmt: off
_ATTRIBUTES = {
    "model, optimizer = fabric.setup(model, optimizer), and loader = fabric.setup_dataloaders(loader)":
        "prepare",
    "model = fabric.setup_module(model)": "prepare_model wrap distributed_model",
    "optimizer = fabric.setup_optimizers(optimizer)":
        "DistributedOptimizer distributed_optimizer prepare_optimizer",
    "loader = fabric.setup_dataloaders(loader)": "prepare_data_loader setup_dataloader process_dataloader",
    "fabric.global_rank": "rank get_rank process_index process_rank rank_id",
    "fabric.local_rank": "local_process_index get_local_rank",
    "fabric.world_size": "size get_world_size num_processes nprocs num_ranks num_replicas",
    "fabric.is_global_zero":
        "is_first_process is_main is_main_process is_master is_rank_0 is_rank_zero is_root "
        "is_world_process_zero",
    "fabric.local_rank == 0": "is_local_main_process is_local_zero",
    "fabric.global_rank == fabric.world_size - 1": "is_last_process",
    "`with fabric.no_backward_sync(model, enabled=not last):` around the backward":
        "accumulate accumulation no_sync gradient_accumulation_steps",
    "fabric.all_reduce(x)": "allreduce average mean reduce reduce_dict reduce_mean sum",
    "fabric.all_gather(x)": "allgather gather_all",
    'fabric.all_gather(x, uneven="cat"), or fabric.compute_metrics(metric)':
        "gather_for_metrics pad_across_processes gather_uneven",
    "fabric.all_gather_object(x)": "allgather_object gather_object",
    "fabric.broadcast(x)": "broadcast_object broadcast_object_list bcast",
    "fabric.barrier()": "wait_for_everyone wait synchronize sync barrier_all",
    "fabric.any(flag)": "check_trigger set_trigger",
    "model.module": "unwrap unwrap_model get_model",
    'fabric.save(path, {"model": model, "optimizer": optimizer})':
        "save_checkpoint save_model save_state register_for_checkpointing",
    'fabric.load(path, {"model": model, "optimizer": optimizer})': "load_checkpoint load_state resume",
    "model.state_dict()": "get_state_dict",
    "fabric.clip_gradients(model, optimizer, max_norm=1.0)":
        "clip_grad clip_grad_norm clip_grad_norm_ unscale_gradients",
    "fabric.clip_gradients(model, optimizer, clip_val=0.5)": "clip_grad_value clip_grad_value_",
    "optimizer.step() and optimizer.zero_grad(): they stay as they are": "step zero_grad optimizer_step",
    "`if fabric.is_global_zero:`": "on_main_process on_last_process on_process",
    "`with fabric.rank_zero_first():`": "main_process_first local_main_process_first first",
    "Fabric(loggers=...) and fabric.log(name, value)": "get_tracker init_trackers trackers tracker",
    "fabric.log_dict({name: value})": "log_metrics log_all",
    "fabric.to_device(batch)": "cpu cuda device_put move_to_device send_to_device to",
    "fabric.backward(loss)": "lomo_backward manual_backward",
    "fabric.world_size > 1": "is_distributed use_distributed",
    "fabric.setup(model, optimizer): it has already made all ranks equal":
        "broadcast_optimizer_state broadcast_parameters",
    "fabric.scatter(x), or torch.distributed.send and recv": "irecv isend recv send",
    "`with fabric.autocast():`": "autocast_context maybe_autocast",
    "Schedulers need no setup: keep using yours.": "prepare_scheduler",
    'Fabric(precision="16-mixed"), under which fabric.backward and optimizer.step scale the loss':
        "grad_scaler loss_scale optimizer_step_was_skipped scale scaler update_scaler",
    "your own variable, which you pass as Fabric(precision=...)":
        "mixed_precision native_amp precision use_amp use_bf16 use_fp16",
    "your own variable: Fabric keeps no state of the loop":
        "current_epoch epoch global_step lr_schedulers optimizers state train_dataloader trainer",
    "your own loop: Fabric has none": "evaluate fit predict test validate",
    "model(batch), model.train() or model.eval(): they stay as they are": "eval forward module train",
    "parameter.requires_grad_(False) around the other model": "toggle_optimizer untoggle_optimizer",
    "torch.cuda.empty_cache()": "clear_cache empty_cache",
    "loader.load_state_dict(state), which continues inside an epoch": "skip_first_batches",
    'fabric.setup_dataloaders(loader, uneven="drop")': "join join_uneven_inputs even_batches split_batches",
    "items[fabric.global_rank :: fabric.world_size]": "split_between_processes",
    "your own counter: `(i + 1) % n == 0` is the last micro-batch": "sync_gradients",
    "fabric.seed_everything(seed)": "manual_seed seed seed_all set_seed",
    "Delete the call: a job ends with its script.": "cleanup clear end_training finish free_memory",
    "fabric.strategy": "distributed_type backend",
    "fabric.profile(folder)": "profiler",
}
_ARGUMENTS = {
    'accelerator="gpu", devices=2': "gpus num_gpus n_gpus ngpus gpu gpu_ids device_ids auto_select_gpus",
    "devices=2": "num_processes world_size nprocs n_procs nproc_per_node num_devices n_devices num_ranks",
    'accelerator="tpu", devices=8': "tpu_cores tpus",
    'accelerator="cpu"': "cpu use_cpu no_cuda",
    'accelerator="cuda", devices=1': "device",
    'precision="bf16-mixed"':
        "amp amp_backend amp_level autocast bf16 dtype fp16 half mixed_precision use_amp",
    'loggers=fabric.loggers.CSVLogger("logs")': "logger log_with trackers tracker",
    "plugins=[...]": "cluster_environment environment plugin",
    "callbacks=[...]": "callback",
    "num_nodes=2": "nodes nnodes num_machines",
    'strategy="ddp"': "distributed_backend distributed_type accelerator_type",
    'strategy=DDPStrategy(process_group_backend="gloo")': "backend process_group_backend",
    "strategy=DDPStrategy(find_unused_parameters=True)":
        "ddp_kwargs find_unused_parameters kwargs_handlers static_graph",
    "strategy=DDPStrategy(timeout=timedelta(minutes=30))": "ddp_timeout init_timeout timeout",
    "strategy=ModelParallelStrategy(parallelize_fn)":
        "device_mesh megatron_lm_plugin model_parallel_size parallelism_config tensor_parallel_size "
        "torch_tp_plugin tp_plan tp_size",
    "strategy=FSDPStrategy(...)": "fsdp_plugin fsdp fsdp_config",
    "strategy=DeepSpeedStrategy(...)": "deepspeed_plugin deepspeed deepspeed_config",
    "`with fabric.no_backward_sync(model, enabled=not last):` around the backward":
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation_plugin",
    "fabric.clip_gradients(model, optimizer, max_norm=1.0) before the step":
        "clip_grad_norm gradient_clip_algorithm gradient_clip_val max_grad_norm",
    "fabric.setup(..., move_to_device=False)": "device_placement move_to_device",
    "fabric.setup(model, optimizer) after fabric.launch()": "model module optimizer optimizers",
    "fabric.setup(torch.compile(model), optimizer)": "compile compile_model dynamo_backend dynamo_plugin",
    "loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)":
        "replace_sampler_ddp use_distributed_sampler",
    "DataLoader(dataset, batch_size=...)": "batch_size num_workers shuffle",
    "torch.backends.cudnn.benchmark = True": "benchmark cudnn_benchmark",
    "torch.use_deterministic_algorithms(True)": "deterministic",
    "torch.autograd.set_detect_anomaly(True)": "detect_anomaly",
    "`with fabric.profile(folder):` around the loop": "profile profiler",
    "`for batch in fabric.progress(loader):`": "enable_progress_bar progress_bar",
    "Delete it: schedulers stay as they are.": "step_scheduler_with_optimizer",
    "Delete it: the launcher gives each process its rank.": "global_rank init_method local_rank rank",
    'fabric.setup_dataloaders(loader, uneven="drop")': "even_batches split_batches dispatch_batches",
    "loggers=CSVLogger(root_dir)": "project_dir logging_dir project_config default_root_dir log_dir",
    "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup": "sync_batchnorm",
    "fabric.seed_everything(seed)": "rng_types seed use_seedable_sampler",
    "your own loop: it decides how long to train, what to log and when to save":
        "barebones check_val_every_n_epoch enable_checkpointing epochs fast_dev_run inference_mode "
        "limit_train_batches limit_val_batches log_every_n_steps max_epochs max_steps max_time min_epochs "
        "min_steps num_sanity_val_steps overfit_batches val_check_interval",
}
_VERBS = {
    "fabric.setup": {
        "fabric.setup(model, optimizer): optimizers are positional": "optim optimizer optimizers",
        "fabric.setup(model, optimizer): the model is the first argument": "model net",
        "loader = fabric.setup_dataloaders(loader)": "dataloader dataloaders loader loaders train_loader",
        "fabric.setup(model, optimizer, scheduler=scheduler)": "lr_scheduler schedulers",
    },
    "fabric.setup_dataloaders": {
        "it in DataLoader(dataset, ...), before setup_dataloaders":
            "batch_size collate_fn drop_last num_workers pin_memory sampler seed shuffle",
        'uneven="drop", "pad", "exact" or "error"': "even_batches join split_batches",
    },
    "fabric.clip_gradients": {
        "max_norm=1.0 to scale the total norm, or clip_val=0.5 to clamp each element":
            "clip clip_grad gradient_clip_val grad_norm max_grad_norm norm value",
    },
    "fabric.load": {
        "Delete it: values are loaded to the device of each object.": "device map_location",
        'fabric.load(path, {"model": model})': "model module",
    },
    "fabric.save": {'fabric.save(path, {"model": model})': "model module obj"},
    "fabric.all_reduce": {'reduce_op="sum", "mean", "min", "max" or "product"': "average op reduction"},
    "fabric.broadcast": {"src=0, the global rank that sends": "from_process root root_rank"},
    "fabric.backward": {
        "fabric.backward(loss), and then optimizer.step()": "optimizer optimizers",
        'fabric.backward(loss): Fabric(precision="16-mixed") scales it': "grad_scaler loss_scale scaler",
        "fabric.backward(loss)": "loss",
        "`with fabric.no_backward_sync(model):` around it": "no_sync sync",
    },
    "fabric.setup_module": {"fabric.setup(model, optimizer)": "optimizer optimizers"},
    "fabric.no_backward_sync": {"fabric.no_backward_sync(model, enabled=not last)": "model net"},
    "fabric.normalize_gradients": {
        "fabric.normalize_gradients(model, num_items)":
            "count denominator items model n net num_tokens total",
    },
    "fabric.find_batch_size": {
        "start=8, the first size that is tried": "batch_size init_val starting_batch_size",
        "global_batch=512, the rows of all ranks per optimizer step": "batch global_batch_size total",
    },
    "fabric.profile": {
        'fabric.profile("trace")': "dirpath filename output path trace_dir",
        "active=3, the number of recorded steps": "num_steps repeat steps",
        "wait=1, warmup=1, active=3, the numbers of steps": "schedule",
        "Delete it: the trace of each rank is written to the folder.": "on_trace_ready",
    },
    "fabric.progress": {
        'desc="epoch 0"': "description name text title",
        "show=True or show=False": "disable enabled main_process_only visible",
        "fabric.progress(loader)": "dataloader iterable loader",
    },
    "fabric.rank_zero_first": {"fabric.rank_zero_first(local=True)": "local_rank node per_node"},
    "fabric.seed_everything": {
        "fabric.seed_everything(seed, per_rank=True)": "device_specific different rank",
        "torch.use_deterministic_algorithms(True)": "deterministic",
    },
    "fabric.init_module": {
        "`with fabric.init_module():` around Model(...)": "device dtype model module precision",
        "empty_init=True": "empty include_buffers meta",
    },
}
_WRAPPERS = {
    "model": {
        "`with fabric.no_backward_sync(model, enabled=not last):` around the backward":
            "gradient_accumulation_steps is_gradient_accumulation_boundary no_sync "
            "set_gradient_accumulation_boundary set_requires_gradient_sync",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0), which returns the norm":
            "clip_grad_norm clip_grad_norm_ get_global_grad_norm",
        "fabric.backward(loss)": "backward",
        "optimizer.step() and optimizer.zero_grad()": "step",
        'fabric.save(path, {"model": model, "optimizer": optimizer}), on all ranks':
            "save_16bit_model save_checkpoint",
        'fabric.load(path, {"model": model, "optimizer": optimizer}), on all ranks': "load_checkpoint",
        "`with fabric.whole(model) as plain:`": "summon_full_params",
        'fabric.setup_dataloaders(loader, uneven="drop")': "join",
    },
    "optimizer": {
        "fabric.backward(loss)": "backward",
        'fabric.save(path, {"optimizer": optimizer}), on all ranks': "consolidate_state_dict",
        "Delete the call: the backward averages the gradients.": "reduce_gradients synchronize",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)":
            "clip_grad_norm clip_grad_norm_ clip_master_grads",
        'Fabric(precision="16-mixed"), under which fabric.backward and optimizer.step scale the loss':
            "loss_scale scale_loss",
    },
    "loader": {
        "It is loader.batch_size times the number of ranks that read different data.": "total_batch_size",
        "your own counter, or loader.batches_done": "end_of_dataloader",
    },
}
# fmt: on
_TORCH = {
    "initialize the default process group twice": "fabric.launch() has made it: delete the call",
    "Default process group has not been initialized": "call fabric.launch() before it",
}
_TORCH_FILES = {
    "/fully_sharded_data_parallel.py": "this function is for torch's first FSDP, which Fabric does not use: "
    'write fabric.save(path, {"model": model}, format="full"), model.state_dict() or fabric.whole(model)',
}
"""Advice for errors that any function of a file of torch raised."""


def attribute_error(owner: Any, name: str) -> AttributeError:
    """Return the error for an attribute that `Fabric` lacks."""
    advice = _advice(_ATTRIBUTES, name)
    close = get_close_matches(name, [one for one in dir(type(owner)) if one[0] != "_"], n=1, cutoff=0.7)
    hint = _sentence(advice) if advice else f" Did you mean {close[0]!r}?" if close else ""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}.{hint}"
    return AttributeError(text, name=name, obj=owner)


def argument_text(verb: str, method: Any, args: tuple[Any, ...], given: dict[str, Any]) -> str | None:
    """Return the error text for arguments that `verb` does not take; None: they are not the cause.

    Args:
        verb: Its name in messages.
        method: The function, whose first argument is `self`.
        args: Positional arguments, with `self`.
        given: Keyword arguments.
    """
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    parameters = [one for one in signature.parameters.values() if one.name != "self" and one.name[0] != "_"]
    known = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    takes_all = any([one.kind is one.VAR_KEYWORD for one in parameters])
    for name in given if not takes_all else ():
        if name not in known:
            return unknown_argument(verb, name, known)
    if verb == "Fabric":
        return f"Fabric({args[1]!r:.60}): arguments are keywords. Write for example Fabric(devices=2)."
    if verb == "fabric.log" and [*map(type, args[1:])][:1] == [dict]:
        return "fabric.log takes one name and one value, but got dict. Write fabric.log_dict({name: value})."
    plain = [one.replace(annotation=one.empty) for one in parameters]
    shown = signature.replace(parameters=plain, return_annotation=signature.empty)
    return f"{verb}: {reason}. Its arguments are {verb}{shown}."


def unknown_argument(verb: str, name: str, known: Sequence[str]) -> str:
    """Return the error text for a keyword argument that `verb` does not take."""
    table = _ARGUMENTS if verb == "Fabric" else _VERBS.get(verb, {})
    advice, close = _advice(table, name), get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}=?" if close else f" It takes {', '.join(known) or 'no argument'}."
    return f"{verb}({name}=...): there is no such argument.{_sentence(advice) if advice else hint}"


def kind_advice(verb: str, wanted: str, given: Any) -> str:
    """Return a further sentence for an object that is not of the class that a verb needs; or ""."""
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    plain = {
        "Module": f" Write {verb}(model).",
        "Optimizer": " Write for example torch.optim.Adam(model.parameters()).",
        "DataLoader": f" Write {verb}(DataLoader(dataset, batch_size=...)).",
    }[wanted]
    if verb == "fabric.normalize_gradients":
        return f" Write {verb}(model, num_items, optimizer=optimizer), with one optimizer."
    if given is None and verb == "fabric.setup" and wanted == "Optimizer":
        return f" Leave it out: {verb}(model)."
    if isinstance(given, type):
        return f" This is the class itself: make an object of it, {given.__name__}(...)."
    if hasattr(given, "get_last_lr"):
        return " Schedulers need no setup: keep using yours."
    if hasattr(given, "unscale_"):
        return ' Fabric(precision="16-mixed") scales the loss: delete the scaler.'
    if isinstance(given, list | tuple | dict):
        each = "*optimizers" if wanted == "Optimizer" else "*loaders"
        if wanted == "Module":
            return " Set each model up by a call of its own: model = fabric.setup(model)."
        before = "model, " if verb == "fabric.setup" else ""
        return f" Unpack it: {verb}({before}{each}{'.values()' if isinstance(given, dict) else ''})."
    if isinstance(given, DataLoader):
        return " Loaders have a verb of their own: loader = fabric.setup_dataloaders(loader)."
    if isinstance(given, Optimizer):
        return " The model is the first argument: fabric.setup(model, optimizer)."
    if isinstance(given, Module) and wanted == "Optimizer":
        return " Set each model up by a call of its own, the model first: fabric.setup(model, optimizer)."
    if isinstance(given, Dataset) and wanted == "DataLoader":
        return plain
    return (
        " Write fabric.setup(model, optimizer)." if verb == "fabric.setup" and wanted == "Module" else plain
    )


def loss_kind_text(given: Any) -> str:
    """Return the error text for an argument of `fabric.backward` that is not a tensor."""
    from numbers import Real

    from torch.nn import Module

    advice = "Write loss = criterion(model(batch), target), and then fabric.backward(loss)."
    if isinstance(given, Real):
        advice = "Write fabric.backward(loss) without .item()."
    elif isinstance(given, dict):
        key = "loss" if "loss" in given else next(iter(given), "loss")
        advice = f"Write fabric.backward(out[{key!r}])."
        advice = advice.replace("'", '"')
    elif isinstance(given, list | tuple):
        advice = "Write fabric.backward(sum(losses))."
    elif hasattr(given, "param_groups"):
        advice = "Write fabric.backward(loss), and then optimizer.step()."
    elif hasattr(given, "loss"):
        advice = "Write fabric.backward(out.loss)."
    elif callable(given) and not isinstance(given, Module):
        advice = "Call it: fabric.backward(loss_function(output, target))."
    elif given is None:
        advice = "Return the loss from the function that computes it."
    return f"fabric.backward needs the loss as a tensor, but got {kind_of(given)}. {advice}"


def backward_error(
    loss: Any, error: Exception, args: tuple[Any, ...], given: dict[str, Any]
) -> FabricError | None:
    """Return the error for a backward that torch refused; None: no argument is the cause.

    Args:
        loss: A tensor.
        error: What torch raised.
        args: Further positional arguments of `fabric.backward`.
        given: Its keyword arguments.
    """
    if isinstance(error, TypeError):
        text = backward_text(args, given)
        return None if text is None else ArgumentTypeError(text)
    text = loss_text(loss, error, bool(args or given.get("gradient") is not None))
    return None if text is None else UsageError(text)


def loss_text(loss: Any, error: Exception, has_gradient: bool) -> str | None:
    """Return the error text for a backward that cannot start from `loss`; None: it is not the cause."""
    if not loss.requires_grad:
        return (
            "fabric.backward got a loss that requires no gradient. It was computed under torch.no_grad() or "
            "inference_mode(), was detached, or depends on frozen parameters only. Compute it from "
            "model(batch) with gradients enabled."
        )
    if loss.numel() != 1 and not has_gradient:
        return (
            f"fabric.backward got a tensor of shape {list(loss.shape)}. A backward starts from one number. "
            "Write fabric.backward(loss.mean()), or pass the gradient: fabric.backward(loss, gradient)."
        )
    if "backward through the graph a second time" in str(error):
        return (
            "fabric.backward was called twice on one graph, which the first call freed. Add the losses and "
            "call it once, or write fabric.backward(loss, retain_graph=True) in the first call."
        )
    return None


def backward_text(args: tuple[Any, ...], given: dict[str, Any]) -> str | None:
    """Return the error text for further arguments of `fabric.backward` that torch does not take."""
    from torch import Tensor

    known = ["gradient", "retain_graph", "create_graph", "inputs"]
    for name in given:
        if name not in known:
            return unknown_argument("fabric.backward", name, known)
    gradient = args[0] if args else given.get("gradient")
    if gradient is None or isinstance(gradient, Tensor):
        return None
    advice = "fabric.backward(loss), and then optimizer.step() of each optimizer"
    if isinstance(gradient, bool):
        advice = f"fabric.backward(loss, retain_graph={gradient})"
    elif hasattr(gradient, "named_parameters"):
        advice = "fabric.backward(loss), which finds the model; or model=model, if the strategy needs it"
    elif not hasattr(gradient, "param_groups"):
        advice = "fabric.backward(loss)"
    return (
        f"fabric.backward got {kind_of(gradient)} as its second argument, which is the gradient of the first "
        f"one, a tensor. Write {advice}."
    )


def torch_advice(text: str, file: str) -> str:
    """Return what to write where torch raised an error that a use of Fabric causes; or "".

    Args:
        text: The error's text.
        file: The file that raised it.
    """
    found = [advice for pattern, advice in _TORCH.items() if re.search(pattern, text)]
    found += [advice for end, advice in _TORCH_FILES.items() if file.endswith(end)]
    return f" ({found[0]})" if found else ""


def wrapper_error(kind: str, name: str, error: AttributeError) -> AttributeError:
    """Return the error for an attribute that wrappers of other libraries have; `error` without advice."""
    advice = _advice(_WRAPPERS[kind], name)
    if advice is None:
        return error
    advised = AttributeError(f"{error}.{_sentence(advice)}", name=name, obj=error.obj)
    advised.__suppress_context__ = True
    return advised


def _sentence(advice: str) -> str:
    return f" {advice}" if advice[0].isupper() and advice.endswith(".") else f" Write {advice}."


def _advice(table: dict[str, str], name: str) -> str | None:
    return next((advice for advice, names in table.items() if name in names.split()), None)
