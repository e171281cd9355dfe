"""Requirements of a strategy on its callers, as a value: `Fabric` and `resolve` never ask for a class.

Also the methods of its base that a user's class overrides, which are looked up once, at setup.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts that must be known without calling the strategy. Empty tuples mean "any"."""

    needs_launch: bool = False
    """Collectives work only after `fabric.launch()`."""
    late_optimizers: bool = False
    """Optimizers must be made after `setup_module`, from the parameters that the model has then."""
    owns_backward: bool = False
    """`loss.backward()` is wrong: only `fabric.backward(loss)` gives right gradients."""
    data_parallel: bool = False
    """Each rank sees its own part of the data."""
    steps_apart: bool = False
    """Each rank steps by its own gradients: what is not linear in them (clipping) differs from one rank's."""
    one_process_per_node: bool = False
    """A rank is a machine, and holds all of its devices; else each device has a rank of its own."""
    splits_parameters: bool = False
    """A rank holds shards of parameters: states of models are gathered, and gradients may be elsewhere."""
    splits_optimizers: bool = False
    """A rank holds shards of optimizer states, which are gathered for a full state."""
    places_models: bool = False
    """Setup brings modules to the device, module by module; else they are moved there before it."""
    fills_meta: bool = False
    """Setup gives values to parameters on the meta device."""
    replicates: tuple[str, ...] = ("parameters", "buffers", "states")
    """Which tensors all ranks hold with equal values between steps, of those that are no DTensors."""
    lockstep: bool = True
    """All ranks make each backward and each step. Not under local SGD and Horovod's `join()`."""
    accelerators: tuple[str, ...] = ()
    """Names of the accelerators that this strategy runs on."""
    precisions: tuple[str, ...] = ()
    """Precision names that this strategy can apply."""
    precisions_why: str = ""
    """What it is about the others."""

    def processes(self, devices: int) -> int:
        """Return the number of processes of a machine: one for each device, unless one holds them all."""
        return devices if self.needs_launch and not self.one_process_per_node else 1


def overridden(kind: type, base: type, *names: str) -> bool:
    """Whether class `kind` replaces any of the methods `names` of `base`."""
    return any([getattr(kind, name) is not getattr(base, name) for name in names])
