"""More rollouts in flight than a step trains on: it starts as soon as enough groups are whole."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from dressage.spec.suite import Case
from worker.training.rewards.weighted import ScoredRollout

Play = Callable[[Case, int], Awaitable[list[ScoredRollout]]]


@dataclass
class _InFlight:
    version: int
    future: "concurrent.futures.Future[list[ScoredRollout]]"


class Flow:
    """Groups that are being played while others are trained on.

    A group is trained on at most `max_staleness` versions after its first token: one that would
    become older is waited for. What is older all the same is dropped, and counted.

    Args:
        play: Plays and scores a group: a case, and the number of the group.
        cases: In the order in which they are begun.
        groups: Of one step.
        total: Groups that will be asked for, in all steps.
        first: Number of the first group.
        max_staleness: Versions of the weights, at least 1.

    Attributes:
        dropped: Groups that were too old, so far.
    """

    def __init__(
        self,
        play: Play,
        cases: Iterator[Case],
        *,
        groups: int,
        total: int,
        first: int = 0,
        max_staleness: int,
    ) -> None:
        self._play, self._cases = play, cases
        self._groups, self._max_staleness = groups, max_staleness
        self._ahead = -(-groups * (1 + max_staleness) // 2)
        self._flying: list[_InFlight] = []
        self._left, self._begun = total, first
        self.dropped = 0
        self._changed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flow", daemon=True)
        self._thread.start()

    def step(self, version: int) -> list[list[ScoredRollout]]:
        """The groups of one step, oldest first; as many new ones are begun.

        Args:
            version: Of the weights that the sampler has.

        Raises:
            RunFailure: A rollout could not be played.
        """
        self._begin(self._ahead, version)
        taken: list[list[ScoredRollout]] = []
        while len(taken) < self._groups:
            for one in self._ready(version, self._groups - len(taken)):
                self._flying.remove(one)
                group = one.future.result()
                if _oldest(group, one.version) < version - self._max_staleness:
                    self.dropped += 1
                else:
                    taken.append(group)
                    self._left -= 1
                self._begin(self._ahead, version)
        return taken

    def close(self) -> None:
        """Let go of everything that is in flight."""
        for one in self._flying:
            one.future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _ready(self, version: int, wanted: int) -> list[_InFlight]:
        """Groups that are whole; those that would be too old in the next step are among them."""
        while True:
            self._changed.clear()
            due = [one for one in self._flying if one.version <= version - self._max_staleness]
            whole = [one for one in self._flying if one.future.done()]
            late = [one for one in due if not one.future.done()]
            # A place is kept for each that must not wait for the next step.
            if len(whole) >= wanted and len(late) == 0:
                return sorted(whole, key=lambda one: one.version)[:wanted]
            early = sorted(whole, key=lambda one: one.version)[: max(0, wanted - len(late))]
            if early:
                return early
            self._changed.wait(1.0)

    def _begin(self, until: int, version: int) -> None:
        while len(self._flying) < min(until, self._left):
            case, number = next(self._cases), self._begun
            self._begun += 1
            playing = self._play(case, number)
            future = asyncio.run_coroutine_threadsafe(_awaited(playing), self._loop)
            future.add_done_callback(lambda _: self._changed.set())
            self._flying.append(_InFlight(version, future))


async def _awaited(playing: Awaitable[list[ScoredRollout]]) -> list[ScoredRollout]:
    return await playing


def _oldest(group: list[ScoredRollout], begun: int) -> int:
    known = [one.rollout.oldest_version for one in group]
    return min((version for version in known if version is not None), default=begun)
