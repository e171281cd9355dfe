"""`Reduced`: every rank holds all parameters; Horovod's optimizers average gradients during the backward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.traits import Traits
from fabric.strategies.layouts.layout import Whole
from fabric.utilities.steps import OnlySetUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.topology import Topology


class Reduced(Whole):
    """Each optimizer that is set up becomes a `DistributedOptimizer`, which owns its gradients until a step.

    Args:
        compression: How gradients travel: a name of `horovod.torch.Compression`.
    """

    traits = Traits(
        needs_launch=True,
        data_parallel=True,
        owns_backward=True,
        precisions=("64-true", "32-true", "16-true", "16-mixed", "bf16-mixed"),
        precisions_why="Horovod does not send bfloat16",
    )

    def __init__(self, compression: str) -> None:
        self.compression = compression
        self._steps = OnlySetUp()
        self._local: set[Tensor] = set()
        self._made = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"compression": self.compression}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module, with rank zero's values on all ranks. All ranks must call this."""
        import horovod.torch as hvd

        hvd.broadcast_parameters(dict(module.named_parameters()), root_rank=0)
        hvd.broadcast_parameters(dict(module.named_buffers()), root_rank=0)
        self._steps.modules[module] = None
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Horovod's optimizer around it, with rank zero's state. All ranks must call this.

        Raises:
            ConfigurationError: It is LBFGS, which computes gradients during a step, where Horovod sends none.
        """
        import horovod.torch as hvd

        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS computes gradients during its step, where Horovod sends none. Write "
                'strategy="ddp", or take another optimizer.'
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # Ranks meet by name. Not by how many there are: one that is garbage is collected here or there first.
        names = [(f"{self._made}.{i}", p) for i, p in enumerate(held)]
        self._made += 1
        compression = getattr(hvd.Compression, self.compression)
        made = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
        made.defaults = optimizer.defaults
        made.state.update(optimizer.state)
        if made.state:
            hvd.broadcast_optimizer_state(made, root_rank=0)
        drop = made.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if made._handles:  # on their way
                made.synchronize()
            made._synchronized = False
            drop(*args, **kwargs)

        made.zero_grad = zero_grad
        self._steps.optimizers[made] = None
        return made  # type: ignore[no-any-return]

    @contextmanager
    def no_sync(self, wrapped: Module) -> Iterator[None]:
        """Backward passes keep the gradients of the module local."""
        before, self._local = self._local, self._local.union(wrapped.parameters())
        try:
            yield
        finally:
            self._local = before

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, in which Horovod sends each gradient, but for those that are local.

        Raises:
            UsageError: The gradients of a backward before have been sent, and no step has taken them.
        """
        for optimizer in self._steps.optimizers:
            for parameter in self._local.intersection(optimizer._allreduce_delay):
                optimizer._allreduce_delay[parameter] += 1  # one pass more than until now
        try:
            run(tensor, *args, **kwargs)
        except AssertionError as error:
            if "backward_passes_per_step" not in str(error):
                raise
            raise UsageError(
                "Two backwards came before one optimizer.step(), and Horovod has sent the gradients of the "
                "first. Let all but the last run under `with fabric.no_backward_sync(model):`."
            ) from error

    def synchronize(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the gradients of these parameters that are on their way. All ranks must call this."""
        held = set(parameters)
        for optimizer in self._steps.optimizers:
            if held.intersection(optimizer._allreduce_delay) and not optimizer._synchronized:
                optimizer.synchronize()

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Before gradients are clipped or divided: they are there."""
        self.synchronize(parameters)

    def teardown(self) -> None:
        """See the base."""
        self._steps.end()
