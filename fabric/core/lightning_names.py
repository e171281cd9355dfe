"""Names of Lightning Fabric 2.6 that another module of this package defines, or that have no counterpart.

Imported at the first use of such a name. A module that only Lightning Fabric has is a file of one or two
lines, such as `fabric/strategies/xla.py`. Add a name here and to the table of
`tests/test_lightning_names.py`.
"""

from __future__ import annotations

_ENGINES = "fabric.integrations."
_FLAGS = "fabric.integrations.lightning.flags"
_HELPERS = "fabric.integrations.lightning.helpers"
_TYPES = "fabric.integrations.lightning.types"
_XLA = "fabric.integrations.tpu.xla"
# fmt: off
_HOMES = {
    "accelerators": {_XLA: "XLAAccelerator", _ENGINES + "tpu.accelerator": "TPUAccelerator"},
    "accelerators.registry": {_HELPERS: "call_register_accelerators", _TYPES: "_AcceleratorRegistry"},
    "accelerators.xla": {_XLA: "XLAAccelerator _using_pjrt", _FLAGS: "_XLA_AVAILABLE"},
    "connector": {_TYPES: "_PLUGIN_INPUT _PRECISION_INPUT"},
    "loggers.tensorboard": {_FLAGS: "_TENSORBOARDX_AVAILABLE _TENSORBOARD_AVAILABLE"},
    "plugins": {_XLA: "XLACheckpointIO XLAPrecision"},
    "plugins.environments": {_XLA: "XLAEnvironment"},
    "plugins.environments.lightning": {
        "fabric.plugins.environments.local": "LightningEnvironment", _HELPERS: "find_free_network_port"},
    "plugins.environments.xla": {_XLA: "XLAEnvironment"},
    "plugins.io": {_XLA: "XLACheckpointIO"},
    "plugins.io.xla": {_XLA: "XLACheckpointIO"},
    "plugins.precision": {_XLA: "XLAPrecision"},
    "plugins.precision.bitsandbytes": {
        _ENGINES + "bitsandbytes.precision": "BitsandbytesPrecision", _FLAGS: "_BITSANDBYTES_AVAILABLE"},
    "plugins.precision.deepspeed": {_ENGINES + "deepspeed.precision": "DeepSpeedPrecision"},
    "plugins.precision.precision": {_TYPES: "_PRECISION_INPUT _PRECISION_INPUT_STR"},
    "plugins.precision.transformer_engine": {
        _ENGINES + "transformer_engine.precision": "TransformerEnginePrecision"},
    "plugins.precision.utils": {_HELPERS: "_convert_fp_tensor"},
    "plugins.precision.xla": {_XLA: "XLAPrecision"},
    "strategies": {
        "fabric.strategies.registry": "_StrategyRegistry",
        _XLA: "SingleDeviceXLAStrategy XLAFSDPStrategy XLAStrategy"},
    "strategies.deepspeed": {
        _ENGINES + "deepspeed.strategy": "DeepSpeedStrategy", _FLAGS: "_DEEPSPEED_AVAILABLE"},
    "strategies.single_xla": {_XLA: "SingleDeviceXLAStrategy"},
    "strategies.xla": {_XLA: "XLAStrategy"},
    "strategies.xla_fsdp": {_XLA: "XLAFSDPStrategy"},
    "utilities.apply_func": {"lightning_utilities.core.apply_func": "apply_to_collection"},
    "utilities.cloud_io": {_HELPERS: "_atomic_save _is_dir _is_local_file_protocol _load"},
    "utilities.data": {_HELPERS: "_set_sampler_epoch"},
    "utilities.device_parser": {_HELPERS: "_parse_gpu_ids"},
    "utilities.distributed": {
        _TYPES: "group", _HELPERS: (
            "_distributed_is_initialized _gather_all_tensors _get_default_process_group_backend_for_device "
            "_sync_ddp_if_available")},
    "utilities.imports": {_FLAGS: "*"},
    "utilities.load": {_HELPERS: "_NotYetLoadedTensor _lazy_load"},
    "utilities.logger": {_HELPERS: "_add_prefix _convert_params _flatten_dict _sanitize_params"},
    "utilities.registry": {_HELPERS: "_load_external_callbacks"},
    "utilities.seed": {_HELPERS: "_collect_rng_states _set_rng_states"},
    "utilities.types": {_TYPES: (
        "CollectibleGroup ProcessGroup _DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH _Stateful")},
    "wrappers": {_HELPERS: "_unwrap_compiled"},
}
"""Module of Lightning Fabric to our modules, each with the names that it defines; "*": all of them."""
_INSTEAD = {
    "strategies.fsdp._get_sharded_state_dict_context":
        "A model under fsdp always holds its own shards. Write model.module.state_dict(), which returns "
        "DTensors, or fabric.save(path, {'model': model}).",
    "strategies.fsdp._get_full_state_dict_context":
        "Write model.state_dict() on all ranks, which returns the whole tensors on each.",
    "strategies.model_parallel._load_checkpoint":
        "Checkpoints of all strategies have one reader. Write fabric.load(path, {'model': model}), or "
        "fabric.load_raw(path, model) for weights alone.",
}
"""What to write for a name that has no counterpart."""
# fmt: on


def find_home(module: str, name: str) -> str | None:
    """Return our module that defines Lightning Fabric's `module.name`; None: the name is not in the table.

    Raises:
        ImportError: It has no counterpart; the message has the alternative.
    """
    if (instead := _INSTEAD.get(f"{module}.{name}")) is not None:
        raise ImportError(f"cannot import name {name!r} from 'fabric.{module}': fabric has none. {instead}")
    homes = _HOMES.get(module, {}).items()
    return next((home for home, names in homes if names == "*" or name in names.split()), None)
