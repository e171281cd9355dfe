"""`RankAssignment`: rank, sizes and store address of an actor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Rank, sizes and store address of an actor, assigned by the launcher after the actors were placed."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    address: str
    port: int
