"""Advantages by hand, by TRL's own formula, and where single precision fails."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dressage.measuring.advantages import advantages_of, has_no_spread

REWARDS = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


def alone(group, scale="group"):
    return advantages_of([group], scale, everyone=[group])


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        # Deviation of n - 1 is 0.57735, and 1e-4 is added.
        ([1e8, 1e8 + 1, 1e8, 1e8 + 1], [-0.8659, 0.8659, -0.8659, 0.8659]),
        ([20000.002, 20000.0, 20000.001, 20000.002], [0.7093, -1.1821, -0.2364, 0.7093]),
        ([1.0, 0.0, 0.0, 0.0], [1.4997, -0.4999, -0.4999, -0.4999]),
    ],
)
def test_by_hand(group, expected):
    assert alone(group) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "group",
    [
        [0.95, 0.95, 0.1 + 0.85, 0.95],
        [0.1 + 0.2, 0.3],
        [0.1 + 0.2 - 0.3, 0.0],
        [1e300, 1e300],
        [0.0] * 4,
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_has_no_advantage_at_all(group, scale):
    assert has_no_spread(group)
    assert alone(group, scale) == [0.0] * len(group)


@pytest.mark.parametrize("group", [[0.0, 1e-6], [1e8, 1e8 + 1], [1.0, 1.0 + 1e-9], [None, 1.0]])
def test_what_has_a_spread(group):
    assert not has_no_spread(group)


def test_a_group_without_a_reward_teaches_nothing_and_counts_for_nothing():
    groups = [[1.0, 0.0], [None, None]]
    got = advantages_of(groups, "batch", everyone=groups)
    assert got[2:] == [0.0, 0.0]
    assert got[:2] == alone([1.0, 0.0], "batch")


@given(st.lists(st.lists(REWARDS, min_size=4, max_size=4), min_size=1, max_size=4))
def test_as_trl_has_it_where_single_precision_is_enough(groups):
    assume(all(max(g) - min(g) > 1 for g in groups))
    rewards = torch.tensor(groups, dtype=torch.float64)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    for scale, divisor in (
        ("group", rewards.std(dim=1, keepdim=True) + 1e-4),
        ("batch", rewards.std() + 1e-4),
        ("none", torch.ones(1, 1)),
    ):
        expected = (centred / divisor).flatten().tolist()
        assert advantages_of(groups, scale, everyone=groups) == pytest.approx(expected, rel=1e-6)


@given(st.lists(REWARDS, min_size=2, max_size=8), st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_add_up_to_nothing(group, scale):
    assert sum(alone(group, scale)) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, group)))
