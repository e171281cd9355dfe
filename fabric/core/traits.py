"""`Traits`: properties of a strategy that `Fabric` and `resolve` read instead of testing for its class.

Also `overridden`: which methods of a base class a user's class overrides, looked up once, at setup.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a strategy. Empty tuples mean "any"."""

    needs_launch: bool = False
    """Collectives work only after `fabric.launch()`."""
    late_optimizers: bool = False
    """Optimizers must be created after `setup_module`, which replaces the model's parameters."""
    owns_backward: bool = False
    """`loss.backward()` gives wrong gradients: the loop must call `fabric.backward(loss)`."""
    data_parallel: bool = False
    """Each rank reads a different part of the data."""
    steps_locally: bool = False
    """Each rank steps with its local gradients: functions that are not linear in them (clipping) differ from
    one process."""
    one_process_per_node: bool = False
    """A rank is a machine and uses all of its devices; otherwise there is one rank per device."""
    splits_parameters: bool = False
    """A rank holds shards of parameters: state dicts are gathered, and gradients may be on other ranks."""
    splits_optimizers: bool = False
    """A rank holds shards of optimizer states, which are gathered for a full state."""
    places_models: bool = False
    """Setup moves modules to the device one by one; otherwise `Fabric` moves the model before it."""
    initialises_meta: bool = False
    """Setup initialises parameters on the meta device."""
    replicates: tuple[str, ...] = ("parameters", "buffers", "states")
    """Kinds of tensors (other than DTensors) that have equal values on all ranks between steps."""
    lockstep: bool = True
    """All ranks make each backward and each step. Not under local SGD and Horovod's `join()`."""
    accelerators: tuple[str, ...] = ()
    """Names of the accelerators that this strategy runs on."""
    precisions: tuple[str, ...] = ()
    """Precision names that this strategy can apply."""
    precisions_why: str = ""
    """Reason why others are not supported, for the error."""

    def processes(self, devices: int) -> int:
        """Return the number of processes per machine: one per device, or one for all devices."""
        return devices if self.needs_launch and not self.one_process_per_node else 1


def overridden(kind: type, base: type, *names: str) -> bool:
    """Whether class `kind` replaces any of the methods `names` of `base`."""
    return any([getattr(kind, name) is not getattr(base, name) for name in names])
