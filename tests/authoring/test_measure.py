import asyncio

import pytest

from dressage.authoring import MeasureContext, fail_reason, measure, pass_reason, score
from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError

CONTEXT = MeasureContext(input="q", expect={})


def test_pass_is_one_and_fail_is_zero():
    assert (pass_reason("a").value, fail_reason("b").value, score(0.25, "c").value) == (1, 0, 0.25)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_score_outside_zero_and_one_is_refused(value):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        score(value, "x")


def test_sync_and_async_measures():
    @measure
    def now(context):
        return pass_reason(context.input)

    @measure
    async def later(context):
        await asyncio.sleep(0)
        return score(0.5, context.input)

    assert now.checked(now.function(CONTEXT)).value == 1
    assert later.checked(asyncio.run(later.function(CONTEXT))).value == 0.5


def test_a_bare_value_is_not_a_verdict():
    @measure
    def sloppy(context):
        return True

    with pytest.raises(TypeError, match="'sloppy' returned bool"):
        sloppy.checked(sloppy.function(CONTEXT))


def test_a_measure_takes_the_context_alone():
    with pytest.raises(MeasureDefinitionError, match="'wrong' takes 2 arguments"):

        @measure
        def wrong(context, other):
            return pass_reason("")


@pytest.mark.parametrize("value", [True, False, "0.5", None, [1]])
def test_a_score_that_is_no_number_is_of_the_wrong_type(value):
    with pytest.raises(MeasureTypeError, match="a score is a number from 0 to 1"):
        score(value, "x")
