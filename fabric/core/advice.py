"""Advice for names of other libraries and for arguments of the wrong kind. Loaded at the first such error."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import Any

# fmt: off
_ATTRIBUTES = {
    "model, optimizer = fabric.setup(model, optimizer), and loader = fabric.setup_dataloaders(loader)":
        "prepare",
    "model = fabric.setup_module(model)": "prepare_model wrap distributed_model",
    "optimizer = fabric.setup_optimizers(optimizer)": "prepare_optimizer distributed_optimizer",
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
    "fabric.all_reduce(x)": "allreduce reduce reduce_mean average mean sum",
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
    "fabric.to_device(batch)": "to move_to_device device_put",
    "loader.load_state_dict(state), which continues inside an epoch": "skip_first_batches",
    'fabric.setup_dataloaders(loader, uneven="drop")': "join join_uneven_inputs even_batches split_batches",
    "items[fabric.global_rank :: fabric.world_size]": "split_between_processes",
    "your own counter: `(i + 1) % n == 0` is the last micro-batch": "sync_gradients",
    "fabric.seed_everything(seed)": "seed set_seed manual_seed",
    "Delete the call: a job ends with its script.": "cleanup clear end_training finish free_memory",
    "fabric.strategy": "distributed_type backend",
    "fabric.profile(folder)": "profiler",
}
_ARGUMENTS = {
    'accelerator="gpu", devices=...': "gpus num_gpus gpu gpu_ids device_ids auto_select_gpus",
    "devices=...": "num_processes world_size nprocs n_procs nproc_per_node num_devices n_devices",
    'accelerator="tpu", devices=...': "tpu_cores tpus",
    'accelerator="cpu"': "cpu use_cpu no_cuda",
    'accelerator="cuda", devices=1': "device",
    'precision="bf16-mixed"':
        "amp amp_backend amp_level autocast bf16 dtype fp16 half mixed_precision use_amp",
    "loggers=...": "logger log_with trackers tracker",
    "plugins=...": "plugin",
    "callbacks=...": "callback",
    "num_nodes=...": "nodes nnodes num_machines",
    "strategy=...": "distributed_backend distributed_type accelerator_type",
    'strategy=DDPStrategy(process_group_backend="gloo")': "backend process_group_backend",
    "strategy=DDPStrategy(find_unused_parameters=True)": "kwargs_handlers find_unused_parameters",
    "strategy=FSDPStrategy(...)": "fsdp_plugin fsdp fsdp_config",
    "strategy=DeepSpeedStrategy(...)": "deepspeed_plugin deepspeed deepspeed_config",
    "`with fabric.no_backward_sync(model, enabled=not last):` around the backward":
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation_plugin",
    "fabric.clip_gradients(model, optimizer, max_norm=1.0) before the step":
        "gradient_clip_val max_grad_norm",
    "fabric.setup(..., move_to_device=False)": "device_placement",
    'fabric.setup_dataloaders(loader, uneven="drop")': "even_batches split_batches dispatch_batches",
    "loggers=CSVLogger(root_dir)": "project_dir logging_dir project_config default_root_dir log_dir",
    "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup": "sync_batchnorm",
    "fabric.seed_everything(seed)": "seed rng_types",
    "your own loop: it decides when to stop": "max_epochs max_steps epochs",
}
_SETUP = {
    "fabric.setup(model, optimizer): optimizers are positional": "optimizer optimizers optim",
    "fabric.setup(model, optimizer): the model is the first argument": "model net",
    "loader = fabric.setup_dataloaders(loader)": "dataloader dataloaders loader loaders train_loader",
    "fabric.setup(model, optimizer, scheduler=scheduler)": "lr_scheduler schedulers",
}
# fmt: on
_TORCH = {
    "initialize the default process group twice": "fabric.launch() has made it: delete the call",
    "Default process group has not been initialized": "call fabric.launch() before it",
}


def attribute_error(owner: Any, name: str) -> AttributeError:
    """Return the error for an attribute that `Fabric` lacks."""
    advice = _advice(_ATTRIBUTES, name)
    close = get_close_matches(name, [one for one in dir(type(owner)) if not one.startswith("_")], n=1)
    hint = _sentence(advice) if advice else f" Did you mean {close[0]!r}?" if close else ""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}.{hint}"
    return AttributeError(text, name=name, obj=owner)


def argument_text(verb: str, method: Any, args: tuple[Any, ...], given: dict[str, Any]) -> str | None:
    """Return the error text for arguments that `verb` does not take; None: they are not the cause."""
    parameters = inspect.signature(method).parameters.values()
    known = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    table = _ARGUMENTS if verb == "Fabric" else _SETUP
    for name in given:
        if name not in known and (verb == "Fabric" or not name.startswith("_")):
            advice, close = _advice(table, name), get_close_matches(name, known, n=1)
            every = ", ".join([one for one in known if one != "self" and one[0] != "_"])
            hint = f" Did you mean {close[0]}=?" if close else f" It takes {every}."
            return f"{verb}({name}=...): there is no such argument.{_sentence(advice) if advice else hint}"
    if verb == "Fabric" and args:
        return f"Fabric({args[0]!r:.60}): arguments are keywords. Write for example Fabric(devices=2)."
    return None


def kind_advice(verb: str, wanted: str, given: Any) -> str:
    """Return a further sentence for an object that is not of the class that a verb needs; or ""."""
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    if isinstance(given, type):
        return f" This is the class itself: make an object of it, {given.__name__}(...)."
    if hasattr(given, "get_last_lr"):
        return " Schedulers need no setup: keep using yours."
    if isinstance(given, list | tuple | dict):
        each = "*optimizers" if wanted == "Optimizer" else "*loaders"
        if wanted == "Module":
            return " Set each model up by a call of its own: model = fabric.setup(model)."
        before = "model, " if verb == "fabric.setup" else ""
        return f" Unpack it: {verb}({before}{each}{'.values()' if isinstance(given, dict) else ''})."
    if isinstance(given, DataLoader):
        return " Loaders have a verb of their own: loader = fabric.setup_dataloaders(loader)."
    if isinstance(given, Dataset) and wanted == "DataLoader":
        return " Write fabric.setup_dataloaders(DataLoader(dataset, batch_size=...))."
    if isinstance(given, Optimizer):
        return " The model is the first argument: fabric.setup(model, optimizer)."
    if isinstance(given, Module) and wanted == "Optimizer":
        return " Set each model up by a call of its own, the model first: fabric.setup(model, optimizer)."
    return ""


def loss_text(loss: Any, error: RuntimeError, has_gradient: bool) -> str | None:
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


def torch_advice(text: str) -> str:
    """Return what to write where torch raised an error with this text that a use of Fabric causes; or ""."""
    return next((f" ({advice})" for pattern, advice in _TORCH.items() if re.search(pattern, text)), "")


def _sentence(advice: str) -> str:
    return f" {advice}" if advice[0].isupper() and advice.endswith(".") else f" Write {advice}."


def _advice(table: dict[str, str], name: str) -> str | None:
    return next((advice for advice, names in table.items() if name in names.split()), None)
