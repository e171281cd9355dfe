"""What a strategy asks of its callers, as a value: `Fabric` and `resolve` never ask for a class."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts that must be known without calling the strategy. Empty tuples mean "any"."""

    needs_launch: bool = False
    """Collectives work only after `fabric.launch()`."""
    late_optimizers: bool = False
    """Optimizers must be made after `setup_module`, from the parameters that the model has then."""
    joint_setup: bool = False
    """Module and optimizers must be set up in one call."""
    owns_backward: bool = False
    """`loss.backward()` is wrong: only `fabric.backward(loss)` gives right gradients."""
    owns_step: bool = False
    """The engine steps the optimizer itself."""
    owns_transfer: bool = False
    """The engine moves modules and batches to the device itself."""
    data_parallel: bool = False
    """Each rank sees its own part of the data."""
    one_process_per_node: bool = False
    """A rank is a machine, and holds all of its devices; else each device has a rank of its own."""
    checkpoint: str = "full"
    """What `save` writes: "full" (one file) or "sharded" (one file per rank)."""
    accelerators: tuple[str, ...] = ()
    """Names of the accelerators that this strategy runs on."""
    precisions: tuple[str, ...] = ()
    """Precision names that this strategy can apply."""
    precisions_why: str = ""
    """What it is about the others."""
    start_methods: tuple[str, ...] = ()
    """How its processes may be started: "popen", "spawn", "fork", "forkserver"."""
