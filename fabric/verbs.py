"""`CollectiveVerbs`: data across ranks, for the user's own loop. All ranks must call every verb here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.tree import map_tree
from fabric.facts import RankFacts
from fabric.strategies.first import first_failure

if TYPE_CHECKING:
    from collections.abc import Iterator


class CollectiveVerbs(RankFacts):
    """barrier, broadcast, all_gather, all_reduce and rank_zero_first."""

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here. All ranks."""
        self._require_launch("barrier()")
        self._strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object on every rank. All ranks. Tensors travel as tensors, never pickled."""
        self._require_launch("broadcast()")
        if not isinstance(src, int):
            raise ArgumentTypeError(
                f"broadcast(src={src!r}): src is a rank, from 0 to {self.world_size - 1}."
            )
        if not 0 <= src < self.world_size:
            raise ConfigurationError(f"broadcast(src={src}): ranks go from 0 to {self.world_size - 1}.")
        return self._strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Every rank's data, each leaf of shape (world_size, *shape), on one process too. All ranks.

        Args:
            data: A tensor, number, or nesting of dict, list, tuple, namedtuple, dataclass; shapes equal on
                all ranks.
            group: A process group; None: all ranks.
            sync_grads: Whether gradients flow back (summed over ranks) to the rank that a part came from.
        """
        self._require_launch("all_gather()")
        return self._strategy.all_gather(data, group, sync_grads)

    def all_reduce(
        self, data: Any, group: Any | None = None, reduce_op: Any = "mean", *, inplace: bool = True
    ) -> Any:
        """The data reduced over ranks, the same bits on every rank. All ranks of the group.

        Args:
            data: A tensor, number, or nesting of dict, list, tuple, namedtuple, dataclass.
            group: A process group; None: all ranks.
            reduce_op: "mean", "sum", "min", "max", "product".
            inplace: Whether the tensors of `data` are overwritten (numbers never are).

        Raises:
            ArgumentTypeError: The mean of integers, or a leaf that is neither tensor nor number.
        """
        self._require_launch("all_reduce()")
        if not inplace:
            data = _copy_tensors(data)
        return self._strategy.all_reduce(data, group, reduce_op)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """The block on rank zero first (a download), then on the others. All ranks.

        If rank zero (of any machine) raises in the block, all ranks raise, and those that come later do not
        enter it.

        Args:
            local: Rank zero of each machine first, instead of rank zero of the job.
        """
        if self.world_size == 1:
            yield
            return
        self._require_launch("rank_zero_first()")
        first = (self.local_rank if local else self.global_rank) == 0
        if first:
            try:
                yield
            except BaseException as error:
                first_failure(self._strategy, local, error)
                raise
        failure = first_failure(self._strategy, local, None)
        if failure is not None:
            raise failure
        if not first:
            yield


def _copy_tensors(data: Any) -> Any:
    return map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, data)
