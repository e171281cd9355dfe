"""`PipelineStrategy`: a model in stages, one per rank, run on micro-batches."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from fabric.core.errors import ConfigurationError
from fabric.strategies.parallel import ParallelStrategy, check_keywords
from fabric.strategies.pipeline.cut import validate_balance
from fabric.strategies.pipeline.layout import Pipeline
from fabric.strategies.pipeline.stage import CHECKPOINT
from fabric.strategies.rows import check_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fabric.strategies.parallel import Processes


class PipelineStrategy(ParallelStrategy):
    """Pipeline parallelism: consecutive blocks of a model on each rank.

    The blocks are the modules of an `nn.Sequential`, or those that the model's method `pipeline_blocks()`
    lists: each takes the output of the one before it. `fabric.setup` keeps on each rank the blocks of its
    stage. Tensors of other stages keep their names and have no elements.

    `model(x)` splits the batch into micro-batches and runs them through the stages. All ranks get the output
    and compute the loss; `fabric.backward(loss)` runs backward from the last stage. For an output that is too
    large for all ranks use `model.pipeline_step(x, y, loss_fn)`: it stays on the last stage. All ranks of a
    pipeline must make each forward and backward, with the same batch. Loaders that are set up return the same
    batch on them. Seed all ranks alike.

    Args:
        balance: Number of blocks of each stage, [2, 3, 3]; "auto": about as many parameters per stage. Pass a
            list if blocks with few parameters take long.
        num_microbatches: Maximum number of micro-batches of a batch; None: twice the number of stages. Stages
            are idle while the pipeline fills and drains: with m micro-batches on p stages a step takes
            (m + p - 1) / m of the time without idle stages. Batches may have any number of rows.
        checkpoint: Activation checkpointing: which micro-batches recompute activations in backward. "always",
            "never", or "except_last": all but those whose backward follows directly on their forward. These
            are the last micro-batch, and with `model.pipeline_step` all of the last stage.
        num_stages: Stages of a pipeline; None: the length of `balance`, or all ranks. With more ranks there
            are several pipelines, which see different data and average their gradients.
        process_group_backend: torch's backend ("gloo", "nccl"); None: the one for the devices.
        timeout: How long a rank waits for the other ranks.
        kwargs: Other arguments of `ParallelStrategy`.

    Raises:
        ConfigurationError: An unknown value, a balance with a number below 1, or (in `Fabric(...)`) a number
            of ranks that is no multiple of the number of stages.
        ArgumentTypeError: `balance` is no list of numbers.

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
        check_keywords(self, PipelineStrategy, kwargs)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **kwargs)
        for name, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
            if number is not None:
                check_number(name, number)
        if checkpoint not in CHECKPOINT:
            raise ConfigurationError(
                f"checkpoint={checkpoint!r} is not one of {', '.join(map(repr, CHECKPOINT))}."
            )
        sizes = validate_balance(balance, num_stages)
        self.layout: Pipeline = Pipeline(sizes, num_stages, num_microbatches, checkpoint)

    @property
    def balance(self) -> list[int] | None:
        """Number of blocks of each stage of the model that was set up last; None before the first setup."""
        return self.layout.balance

    @property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self.layout.stage[0]

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the model's output."""
        stage, count = self.layout.stage
        return stage == count - 1
