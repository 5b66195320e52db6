"""The intervals that everything shows. Their coverage: `bench/coverage.py`."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.intervals import of_repetitions, paired_passes, paired_rewards


def cases(values):
    return {str(at): value for at, value in enumerate(values)}


def test_a_clear_gain_by_hand():
    """40 of 80 became better, none worse: 41/82 - 1/82, and its standard error."""
    before, after = cases([n % 4 == 0 for n in range(80)]), cases([n % 4 != 3 for n in range(80)])
    gain = paired_passes(before, after)
    assert (gain.before, gain.after, gain.count, gain.few) == (0.25, 0.75, 80, False)
    half = 1.959964 * sqrt((42 / 82 - (40 / 82) ** 2) / 82)
    assert gain.low == pytest.approx(40 / 82 - half)
    assert gain.high == pytest.approx(40 / 82 + half)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_so_few_cases_have_no_interval(count):
    gain = paired_passes(cases([False] * count), cases([True] * count))
    assert (gain.low, gain.high, gain.few, gain.after) == (None, None, True, 1.0)


@pytest.mark.parametrize("values", [[True] * 8, [False] * 8, [True, False] * 4])
def test_equal_pairs_do_not_make_an_interval_of_no_width(values):
    gain = paired_passes(cases(values), cases(values))
    assert gain.low < -0.2 < 0.2 < gain.high
    assert gain.few


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=5, max_size=60))
def test_an_interval_of_rates_is_never_outside_of_what_can_be(pairs):
    before, after = cases([b for b, _ in pairs]), cases([a for _, a in pairs])
    gain, back = paired_passes(before, after), paired_passes(after, before)
    assert -1 <= gain.low < gain.high <= 1
    assert (gain.low, gain.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


def test_only_cases_of_both_count():
    assert paired_passes({"a": True}, {"b": True}) is None
    assert paired_rewards({"a": 1.0}, {"b": 1.0}) is None
    assert paired_passes({"a": False, "x": True}, {"a": True, "y": False}).count == 1


def test_rewards_need_twenty_cases_and_some_difference():
    nineteen = cases([float(n) for n in range(19)])
    assert paired_rewards(nineteen, nineteen).low is None
    same = cases([3.5] * 30)
    assert paired_rewards(same, same).low is None
    twenty = cases([float(n % 2) for n in range(20)])
    gain = paired_rewards(twenty, twenty)
    # Two made-up cases of ±0.5 among 22: deviation √(0.5/22), t of 19 degrees.
    assert gain.high == pytest.approx(2.093 * sqrt(0.5 / 22) / sqrt(22))


@given(st.lists(st.floats(-1e9, 1e9), min_size=20, max_size=50))
def test_numbers_of_any_size_have_a_finite_interval(values):
    gain = paired_rewards(cases(values), cases(values[::-1]))
    assert gain.low is None or gain.low <= gain.difference + 1e-3 * abs(gain.difference) + 1


def test_repetitions_by_hand_and_within_what_can_be():
    low, high = of_repetitions([0.5, 0.6, 0.7])
    assert (low, high) == (
        pytest.approx(0.6 - 4.303 * 0.1 / sqrt(3)),
        pytest.approx(0.848, abs=1e-3),
    )
    assert of_repetitions([0.2, 1.0, 0.5], within=(0, 1)) == (0.0, 1.0)
    assert of_repetitions([0.7]) is None
    assert of_repetitions([0.7, 0.7, 0.7]) is None
