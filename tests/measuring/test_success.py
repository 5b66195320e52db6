"""Which rollouts are solved: what pass rates, gains and best weights go by."""

import pytest

from dressage.measuring.combine import combined, may_decide
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import RewardSpec


def verdict(value, passed=None, error=None):
    return MeasureVerdict(measure="m", value=value, reason="", passed=passed, error=error)


RIGHT, WRONG = verdict(1.0, passed=True), verdict(0.0, passed=False)


@pytest.mark.parametrize(
    ("rewards", "verdicts", "reward", "passed"),
    [
        # Shaping beside what says pass or fail does not decide.
        ([{}, {"weight": 0.2}], [RIGHT, verdict(0.4)], 1.08, True),
        ([{}, {"weight": 0.2}], [WRONG, verdict(1.0)], 0.2, False),
        # Where all give numbers, each must reach 1.
        ([{}, {}], [verdict(1.0), verdict(1.0)], 2.0, True),
        ([{}, {}], [verdict(1.0), verdict(0.9)], 1.9, False),
        # A penalty has no part in it.
        ([{}, {"weight": -1}], [RIGHT, verdict(0.0, passed=False)], 1.0, True),
        # Who says so decides, also when it gives numbers.
        ([{}, {"success": True}], [WRONG, verdict(1.0)], 1.0, True),
        ([{}, {"success": True}], [RIGHT, verdict(0.9)], 1.9, False),
        ([{"success": False}, {}], [WRONG, verdict(1.0)], 1.0, True),
        # Nothing can say it.
        ([{"weight": -1}], [verdict(0.0)], 0.0, False),
        # A reward that does not apply to a rollout says nothing.
        ([{}, {}], [RIGHT, verdict(None)], 1.0, True),
        ([{}], [verdict(None)], None, False),
        ([{}, {}], [RIGHT, verdict(None, error="raised")], None, False),
    ],
)
def test_what_counts_as_solved(rewards, verdicts, reward, passed):
    specs = [RewardSpec(measure=f"m{at}", **fields) for at, fields in enumerate(rewards)]
    assert combined(specs, verdicts) == (pytest.approx(reward), passed)


def test_without_a_positive_weight_nothing_decides():
    assert may_decide([RewardSpec(measure="a", weight=-1)]) == []
    assert may_decide([RewardSpec(measure="a", success=False), RewardSpec(measure="b")]) == [1]


def test_a_penalty_is_no_success_and_two_of_a_type_have_names():
    with pytest.raises(ValueError, match="penalty"):
        RewardSpec(measure="a", weight=-1, success=True)
    one = RewardSpec.model_validate({"measure": {"type": "contains"}, "name": "says why"})
    assert one.name == "says why"
    assert RewardSpec.model_validate(one.model_dump()).name == "says why"
