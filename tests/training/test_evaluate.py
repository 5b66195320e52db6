import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.spec.suite import Case
from dressage.spec.training import EvaluationSpec
from worker.training.evaluate import paired_gain, split
from worker.training.process.seeds import derived_seed

CASES = [Case(id=str(n), input="q") for n in range(100)]


@pytest.mark.parametrize(("holdout", "count"), [(0, 0), (0.2, 20), (0.001, 1), (0.333, 33)])
def test_the_share_held_out(holdout, count):
    training, held_out = split(CASES, EvaluationSpec(holdout=holdout).held_out(len(CASES)))
    assert len(held_out) == count
    assert {c.id for c in training} | {c.id for c in held_out} == {c.id for c in CASES}
    assert len(training) + len(held_out) == 100


def test_a_larger_suite_keeps_its_old_cases_on_their_side():
    more = [*CASES, *(Case(id=f"new {n}", input="q") for n in range(100))]
    held = {c.id for c in split(CASES, 20)[1]}
    still = {c.id for c in split(more, 40)[1]}
    # The cut moves a little with the share, but sides are a property of the case.
    assert len(held & still) >= 14


def test_a_clear_gain_excludes_zero_and_none_does_not():
    before = {str(n): float(n % 4 == 0) for n in range(80)}
    after = {str(n): float(n % 4 != 3) for n in range(80)}
    gain = paired_gain(before, after)
    assert (gain.before, gain.after, gain.difference) == (0.25, 0.75, 0.5)
    assert 0.38 < gain.low < 0.42
    assert 0.58 < gain.high < 0.62
    same = paired_gain(before, before)
    assert (same.low, same.difference, same.high) == (0, 0, 0)


def test_only_cases_of_both_count():
    assert paired_gain({"a": 1.0}, {"b": 1.0}) is None
    assert paired_gain({"a": 0.0, "x": 1.0}, {"a": 1.0, "y": 0.0}).count == 1


@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1)
)
def test_the_interval_holds_the_difference(pairs):
    before = {case: b for case, (b, _) in pairs.items()}
    after = {case: a for case, (_, a) in pairs.items()}
    gain = paired_gain(before, after)
    assert gain.low - 1e-9 <= gain.difference <= gain.high + 1e-9 or len(pairs) > 1


def test_seeds_differ_by_every_part():
    seeds = {derived_seed(0, "train", step, case) for step in range(50) for case in range(50)}
    assert len(seeds) == 2500
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert derived_seed(0, "train", 1) == derived_seed(0, "train", 1)
