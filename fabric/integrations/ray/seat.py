"""`Seat`: what an actor is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank, which the launcher gives it when it knows where the actors are."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    address: str
    port: int
