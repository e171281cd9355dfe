"""DeepSpeed's configuration, from keywords of `DeepSpeedStrategy`, a file or dictionary, and our defaults."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError

VARIABLE = "FABRIC_DEEPSPEED_CONFIG_PATH"

CONFIG_PATHS = {
    "stage": "zero_optimization.stage",
    "contiguous_gradients": "zero_optimization.contiguous_gradients",
    "overlap_comm": "zero_optimization.overlap_comm",
    "allgather_partitions": "zero_optimization.allgather_partitions",
    "reduce_scatter": "zero_optimization.reduce_scatter",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "sub_group_size": "zero_optimization.sub_group_size",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "logging_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "partition_activations": "activation_checkpointing.partition_activations",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "contiguous_memory_optimization": "activation_checkpointing.contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "activation_checkpointing.synchronize_checkpoint_boundary",
}
"""Keywords of `DeepSpeedStrategy` to their paths in a configuration."""
_OFFLOAD_OPTIMIZER = {
    "offload_optimizer_device": "device",
    "nvme_path": "nvme_path",
    "optimizer_buffer_count": "buffer_count",
    "pin_memory": "pin_memory",
}
_OFFLOAD_PARAMS = {
    "offload_params_device": "device",
    "nvme_path": "nvme_path",
    "params_buffer_count": "buffer_count",
    "params_buffer_size": "buffer_size",
    "max_in_cpu": "max_in_cpu",
    "pin_memory": "pin_memory",
}
_AIO = ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events")
_FP16 = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_loss_scale",
}


def config_paths(keywords: dict[str, Any]) -> dict[str, str]:
    """Return the path in a configuration of each keyword that applies."""
    found = dict(CONFIG_PATHS)
    if keywords["offload_optimizer"]:
        found |= {
            name: f"zero_optimization.offload_optimizer.{key}" for name, key in _OFFLOAD_OPTIMIZER.items()
        }
    if keywords["offload_parameters"]:
        found |= {name: f"zero_optimization.offload_param.{key}" for name, key in _OFFLOAD_PARAMS.items()}
    if "nvme" in (keywords["offload_optimizer_device"], keywords["offload_params_device"]):
        found |= {name: f"aio.{name}" for name in _AIO}
    return found


def read(config: Any) -> tuple[dict[str, Any], str]:
    """Return the user's configuration (empty if there is none) and its source for messages.

    Raises:
        ArgumentTypeError: It is neither a dictionary nor a path.
        ConfigurationError: There is no such file, or it is not a JSON dictionary.
    """
    where = "config"
    if config is None:
        config, where = os.environ.get(VARIABLE), VARIABLE
    if not config:
        return {}, where
    if isinstance(config, dict):
        return deepcopy(config), where  # DeepSpeed modifies the dictionary
    if not isinstance(config, str | Path):
        raise ArgumentTypeError(
            f"config must be a dictionary or the path of a JSON file, but is a {type(config).__name__}."
        )
    try:
        found = json.loads(Path(config).read_text())
    except OSError as error:
        raise ConfigurationError(f"{where} names {config}, which cannot be read: {error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{where} names {config}, which is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{where} names {config}, which holds a {type(found).__name__}, no dictionary."
        )
    return found, f"{where} ({config})"


def joined(keywords: dict[str, Any], defaults: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the user's configuration, extended by keywords.

    Raises:
        ConfigurationError: They contradict each other; or the configuration accumulates gradients itself.
    """
    found, where = read(config)
    for name, path in config_paths(keywords).items():
        value = keywords[name]
        if value is None:
            continue
        existing = get(found, path)
        if existing is None:
            put(found, path, value)
        elif existing != value and value != defaults[name]:
            raise ConfigurationError(
                f"DeepSpeedStrategy({name}={value!r}) and {path}={existing!r} in {where} contradict each "
                "other. Write one of them."
            )
    steps = found.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto"):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps!r} in {where}: how many backwards make a step is your "
            "loop's. Leave it out, and call optimizer.step() after so many; divide each loss by it."
        )
    stage = get(found, "zero_optimization.stage")
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f'DeepSpeed with stage {stage!r} splits nothing: that is DDP. Write strategy="ddp", or stage=1, '
            "2 or 3."
        )
    return found


def complete(found: dict[str, Any], precision: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the complete configuration of an engine.

    Raises:
        ConfigurationError: Its precision differs from `Fabric(precision=...)`.
    """
    config = deepcopy(found)
    requested = {"16": "fp16", "bf": "bf16"}.get(precision[:2])
    for name in ("fp16", "bf16"):
        enabled = get(config, f"{name}.enabled")
        if enabled is not None and enabled != "auto" and bool(enabled) != (name == requested):
            raise ConfigurationError(
                f"Fabric(precision={precision!r}) and {name}.enabled={enabled!r} in DeepSpeed's config "
                "contradict each other. Write the precision in Fabric only."
            )
        put(config, f"{name}.enabled", name == requested)
    if requested == "fp16":
        for name, key in _FP16.items():
            if get(config, f"fp16.{key}") is None:
                put(config, f"fp16.{key}", keywords[name])
    if get(config, "zero_optimization.stage") == 1:
        # Gradients are reduced before they are used, maybe after several backwards.
        put(config, "zero_optimization.overlap_comm", False)
    config["gradient_accumulation_steps"] = 1
    config.pop("train_batch_size", None)
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # that optimizer would be compiled
    config.setdefault("steps_per_print", 1 << 62)
    config.setdefault("gradient_clipping", 0.0)  # its default is 1
    if "optimizer" in config:
        config["optimizer"].setdefault("params", {}).setdefault(
            "torch_adam", True
        )  # DeepSpeed's own Adam would be compiled, too
    return config


def get(config: dict[str, Any], path: str) -> Any:
    """Return the value at a path such as "a.b"; None if there is none."""
    for key in path.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(key)  # type: ignore[assignment]
    return config


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path such as "a.b"."""
    *inner, last = path.split(".")
    for key in inner:
        config = config.setdefault(key, {})
    config[last] = value
