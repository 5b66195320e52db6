"""Groups in flight: how old they are when they are trained on, whatever they take."""

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.training.process.failures import RunFailure
from worker.training.update.flow import Flow


class World:
    """Plays groups that take as many milliseconds as they are told; 100: until they are let go."""

    def __init__(self, lengths):
        self.version, self._lengths = 0, lengths
        self.begun = []

    async def play(self, case, number):
        first = self.version
        self.begun.append((case, number))
        length = self._lengths[number % len(self._lengths)]
        await asyncio.sleep(length / 1000)
        while length == 100 and not self.released:
            await asyncio.sleep(0.001)
        rollout = SimpleNamespace(oldest_version=first, number=number)
        return [SimpleNamespace(rollout=rollout)] * 2

    released = False


def run(world, *, steps, groups, max_staleness):
    flow = Flow(
        world.play,
        itertools.count(),
        groups=groups,
        total=steps * groups,
        max_staleness=max_staleness,
    )
    batches = []
    for step in range(steps):
        batches.append(flow.step(step))
        world.version = step + 1
    flow.close()
    return flow, batches


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=7),
    groups=st.integers(1, 5),
    max_staleness=st.integers(1, 3),
    steps=st.integers(1, 6),
)
def test_every_step_is_whole_no_group_is_too_old_and_none_is_lost(
    lengths, groups, max_staleness, steps
):
    world = World(lengths)
    flow, batches = run(world, steps=steps, groups=groups, max_staleness=max_staleness)
    assert [len(batch) for batch in batches] == [groups] * steps
    numbers = [group[0].rollout.number for batch in batches for group in batch]
    assert len(set(numbers)) == len(numbers)
    for step, batch in enumerate(batches):
        ages = [step - group[0].rollout.oldest_version for group in batch]
        assert all(0 <= age <= max_staleness for age in ages)
    assert flow.dropped == 0
    # No more is begun than is trained on, and each case once.
    assert len(world.begun) == steps * groups
    assert [case for case, _ in world.begun] == list(range(steps * groups))


def test_a_slow_group_is_overtaken_and_waited_for_before_it_is_too_old():
    world = World([100, 0, 0, 0])  # every fourth is stuck until it is let go
    flow = Flow(world.play, itertools.count(), groups=2, total=20, max_staleness=2)
    first = flow.step(0)
    assert [group[0].rollout.number for group in first] == [1, 2]
    world.version = 1
    second = flow.step(1)
    assert 0 not in [group[0].rollout.number for group in second]
    world.version = 2

    taken = []
    thread = threading.Thread(target=lambda: taken.append(flow.step(2)))
    thread.start()
    time.sleep(0.3)
    assert not taken  # group 0 would be three versions old in the next step
    world.released = True
    thread.join(10)
    assert 0 in [group[0].rollout.number for group in taken[0]]
    flow.close()


def test_a_failure_in_one_group_is_the_failure_of_the_step():
    async def play(case, number):
        raise RunFailure("x", f"group {number}")

    flow = Flow(play, itertools.count(), groups=2, total=4, max_staleness=1)
    with pytest.raises(RunFailure, match="group"):
        flow.step(0)
    flow.close()
