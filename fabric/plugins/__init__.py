"""Objects for `Fabric(plugins=...)`: precision, environments, collectives, checkpoint IO."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
    from fabric.checkpoint.torch_io import TorchCheckpointIO as TorchCheckpointIO
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment as ClusterEnvironment
    from fabric.precision.mixed import FSDPPrecision as FSDPPrecision
    from fabric.precision.mixed import MixedPrecision as MixedPrecision
    from fabric.precision.precision import Precision as Precision
    from fabric.precision.true import DoublePrecision as DoublePrecision
    from fabric.precision.true import HalfPrecision as HalfPrecision

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BitsandbytesPrecision": "fabric.integrations.bitsandbytes.precision",
        "CheckpointIO": "fabric.checkpoint.checkpoint_io",
        "ClusterEnvironment": "fabric.plugins.environments.cluster_environment",
        "DeepSpeedPrecision": "fabric.integrations.deepspeed.precision",
        "DoublePrecision": "fabric.precision.true",
        "FSDPPrecision": "fabric.precision.mixed",
        "HalfPrecision": "fabric.precision.true",
        "MixedPrecision": "fabric.precision.mixed",
        "Precision": "fabric.precision.precision",
        "TorchAOPrecision": "fabric.integrations.torchao.precision",
        "TorchCheckpointIO": "fabric.checkpoint.torch_io",
        "TransformerEnginePrecision": "fabric.integrations.transformer_engine.precision",
    },
)
