"""Several processes of one run, one for each GPU: what they tell each other.

Each plays its own part of the rollouts. Whatever decides how the run continues is gathered first,
so that all of them decide alike; files of the whole run are written by the first one.
"""

from typing import Any

import torch.distributed as dist

# A rank that waits for a long evaluation is no failure; one that hangs is found by its supervisor.
PATIENCE_SECONDS = 24 * 3600


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if _several() else 0


def count() -> int:
    """How many there are."""
    return dist.get_world_size() if _several() else 1


def all_of(items: list[Any]) -> list[Any]:
    """The items of all processes, first process first, in every one of them."""
    if not _several():
        return items
    gathered: list[list[Any]] = [[] for _ in range(count())]
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]


def any_of(flag: bool) -> bool:
    """Whether it is so in any process."""
    return any(all_of([flag]))


def wait_for_all() -> None:
    """Go on when every process has come here."""
    if _several():
        dist.barrier()


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()
