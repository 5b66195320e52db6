"""What a rollout asks of a model, and what it gets."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dressage.seeds import derived_seed


@dataclass(frozen=True)
class Sampling:
    """How a continuation is drawn. Temperature 0 means greedy; `top_k` 0 means no limit."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Turn:
    """One continuation that is asked for.

    Attributes:
        prompt: Token ids of everything so far.
        limit: Tokens that may be written, the one that ends a turn included.
        sampling: How they are drawn.
        seed: Of the draw.
    """

    prompt: list[int]
    limit: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Sampled:
    """What was written.

    Attributes:
        ids: Token ids, the one that ends the turn included.
        logps: The log-probability of each when it was drawn: of the distribution that was drawn
            from, temperature and limits included.
        versions: The version of the weights that wrote each: the optimizer steps behind them.
    """

    ids: list[int]
    logps: list[float]
    versions: list[int]


@dataclass(frozen=True)
class Draws:
    """How a batch of rollouts is drawn: each turn by a seed of its own.

    A draw hangs on the rollout and its turn, and on nobody else in the batch.
    """

    sampling: Sampling
    seed: int

    def turn(self, prompt: list[int], limit: int, *place: str | int) -> Turn:
        """The turn at a place: case, index in the group, number of the turn."""
        return Turn(prompt, limit, self.sampling, derived_seed(self.seed, *place))


class Sampler(Protocol):
    """Writes continuations, many at a time.

    Attributes:
        end_ids: The tokens that end a turn.
    """

    end_ids: frozenset[int]

    async def sample(self, turn: Turn) -> Sampled:
        """Continue a prompt.

        Raises:
            RunFailure: The model cannot write any more.
        """

    def join(self, players: int = 1) -> None:
        """Say that somebody will ask, again and again, until it leaves."""

    def leave(self, players: int = 1) -> None:
        """Say that somebody has asked for the last time."""


async def sample_all(sampler: Sampler, turns: Sequence[Turn]) -> list[Sampled]:
    """All of them, side by side, by a player who is not one yet."""
    sampler.join(len(turns))
    try:
        return list(await asyncio.gather(*map(sampler.sample, turns)))
    finally:
        sampler.leave(len(turns))
