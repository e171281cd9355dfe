"""`PipelineStrategy`: a model in stages, one on each rank, fed with micro-batches. The loop stays."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from fabric.core.errors import ConfigurationError
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.pipeline.cut import checked_balance
from fabric.strategies.pipeline.layout import Pipeline
from fabric.strategies.pipeline.stage import CHECKPOINT
from fabric.strategies.rows import check_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fabric.strategies.parallel import Processes


class PipelineStrategy(ParallelStrategy):
    """The blocks of a model on several ranks, one stage after the other.

    `fabric.setup` keeps on each rank the blocks of its stage: of an `nn.Sequential` its modules, of others
    what their method `pipeline_blocks()` lists, modules of which each takes what the one before returned.
    Tensors of other stages keep their names here, and have no elements. `model(x)` cuts the batch into
    micro-batches, which follow each other through the stages; the output comes to all ranks, all compute the
    loss, and `fabric.backward(loss)` goes back from the last stage. An output that is too large for all ranks
    stays on the last one with `model.pipeline_step(x, y, loss_fn)`. All ranks of a pipeline must make each
    forward and backward, with the same batch (loaders that are set up see to it). Seed all ranks alike.

    Args:
        balance: How many blocks each stage has, [2, 3, 3]; "auto": stages of about as many parameters. Write
            it where blocks with few parameters take long.
        num_microbatches: Into how many parts a batch is cut, at most; None: twice the number of stages. While
            they fill and drain the pipeline, stages wait: a step takes (m + p - 1) / m of the time of m full
            micro-batches on p stages. Batches may have any number of rows.
        checkpoint: Which micro-batches keep their inputs only, and compute their activations again in
            backward: "always", "except_last" (all but those that go back right after their forward: the last
            one, with `model.pipeline_step` those of the last stage), "never".
        num_stages: Stages of a pipeline; None: as many as `balance` has, or all ranks. Further ranks make
            further rows, which see different data and average their gradients.
        process_group_backend: torch's backend ("gloo", "nccl"); None: what fits the devices.
        timeout: How long a rank waits for the other ranks.
        kwargs: Others of `ParallelStrategy`.

    Raises:
        ConfigurationError: A value that is not known, a balance with a number below 1, ranks that cannot be
            divided into stages (when `Fabric` is made).
        ArgumentTypeError: A balance that is no list of numbers.

    Source: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/1806.03377)
    """

    def __init__(
        self,
        balance: Literal["auto"] | list[int] = "auto",
        num_microbatches: int | None = None,
        checkpoint: Literal["always", "except_last", "never"] = "except_last",
        *,
        num_stages: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        **kwargs: Unpack[Processes],
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **kwargs)
        for name, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
            if number is not None:
                check_number(name, number)
        if checkpoint not in CHECKPOINT:
            raise ConfigurationError(
                f"checkpoint={checkpoint!r} is not one of {', '.join(map(repr, CHECKPOINT))}."
            )
        sizes = checked_balance(balance, num_stages)
        self.layout: Pipeline = Pipeline(sizes, num_stages, num_microbatches, checkpoint)

    @property
    def balance(self) -> list[int] | None:
        """The number of blocks of each stage, of the model that was set up last; None before any."""
        return self.layout.balance

    @property
    def stage(self) -> int:
        """Number of this rank's stage."""
        return self.layout.stage[0]

    @property
    def is_last_stage(self) -> bool:
        """Whether the output comes from this rank."""
        stage, count = self.layout.stage
        return stage == count - 1
