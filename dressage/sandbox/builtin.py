"""Built-in measures: a finished rollout in, a verdict out. An empty answer never scores."""

import unicodedata
from dataclasses import replace
from decimal import Decimal
from functools import singledispatch
from typing import Any

import jsonschema
from referencing import Registry

from dressage import strict_json
from dressage.authoring.measure import MeasureContext, MeasureResult, fail_reason, pass_reason
from dressage.sandbox.numbers import last_number, shown
from dressage.sandbox.patterns import compile_pattern
from dressage.spec.measure import (
    BuiltinMeasure,
    Contains,
    ExactMatch,
    JsonSchema,
    LengthLimit,
    NoToolErrors,
    NumericCloseness,
    RegexMatch,
    ToolCalled,
    ToolNotCalled,
    ToolSequence,
)

REGEX_SECONDS = 1.0
MANNER = (LengthLimit, NoToolErrors, ToolNotCalled)
TOLERANCE = 1e-6  # of numbers that are not whole, unless the measure says otherwise


class MissingExpectation(ValueError):
    """The case does not say what is expected."""


def evaluate(spec: BuiltinMeasure, context: MeasureContext) -> MeasureResult:
    """The verdict of a built-in measure.

    Raises:
        MissingExpectation: The case lacks the field to compare with. The measure has failed then,
            not the rollout.
    """
    verdict = _verdict(spec, context)
    # How an answer was made or put is no sign that it is right, so it does not decide that.
    return replace(verdict, passed=None) if isinstance(spec, MANNER) else verdict


@singledispatch
def _verdict(spec: Any, context: MeasureContext) -> MeasureResult:
    raise NotImplementedError(f"{type(spec).__name__} for {context.input!r}")


@_verdict.register
def _(spec: ExactMatch, context: MeasureContext) -> MeasureResult:
    expected, answer = _pair(spec.field, context, case_sensitive=spec.case_sensitive)
    if answer and answer == expected:
        return pass_reason("the expected text")
    return fail_reason(f"answered {answer[:200]!r}, expected {expected[:200]!r}")


@_verdict.register
def _(spec: Contains, context: MeasureContext) -> MeasureResult:
    expected, answer = _pair(spec.field, context, case_sensitive=spec.case_sensitive)
    if answer and expected in answer:
        return pass_reason("contains the expected text")
    return fail_reason(f"does not contain {expected[:200]!r}")


@_verdict.register
def _(spec: RegexMatch, context: MeasureContext) -> MeasureResult:
    pattern = compile_pattern(spec.pattern)
    try:
        found = pattern.search(context.final.text, timeout=REGEX_SECONDS)
    except TimeoutError:
        return fail_reason("the pattern took too long on this answer")
    if found and context.final.text.strip():
        return pass_reason(f"found {found.group()[:200]!r}")
    return fail_reason("the pattern is not found")


@_verdict.register
def _(spec: NumericCloseness, context: MeasureContext) -> MeasureResult:
    expected = last_number(str(_expected(spec.field, context)))
    if expected is None:
        raise MissingExpectation(f"expect.{spec.field} is not a number")
    answered = last_number(context.final.text)
    if answered is None:
        return fail_reason("the answer has no number")
    whole = answered == answered.to_integral_value() and expected == expected.to_integral_value()
    if spec.tolerance is None and whole:
        close = answered == expected
    else:
        tolerance = Decimal(repr(spec.tolerance if spec.tolerance is not None else TOLERANCE))
        close = abs(answered - expected) <= tolerance * max(Decimal(1), abs(expected))
    if close:
        return pass_reason(f"{shown(answered)} is close enough")
    return fail_reason(f"answered {shown(answered)}, expected {shown(expected)}")


@_verdict.register
def _(spec: JsonSchema, context: MeasureContext) -> MeasureResult:
    try:
        content = strict_json.loads(context.final.text)
    except ValueError:
        return fail_reason("the answer is not JSON")
    validator = jsonschema.validators.validator_for(
        spec.json_schema, default=jsonschema.Draft202012Validator
    )
    # An empty registry: without one, references to files and addresses are fetched.
    checks = validator(spec.json_schema, registry=Registry())
    problem = jsonschema.exceptions.best_match(checks.iter_errors(content))
    if problem:
        return fail_reason(f"{problem.json_path}: {problem.message}"[:500])
    return pass_reason("valid")


@_verdict.register
def _(spec: ToolCalled, context: MeasureContext) -> MeasureResult:
    calls = [c for c in context.tool_calls if c.name == spec.tool and c.error is None]
    counted = f"{spec.tool} was called {len(calls)} times without an error"
    return pass_reason(counted) if len(calls) >= spec.times else fail_reason(counted)


@_verdict.register
def _(spec: ToolNotCalled, context: MeasureContext) -> MeasureResult:
    if not context.final.text.strip():
        return fail_reason("there is no answer")
    if any(call.name == spec.tool for call in context.tool_calls):
        return fail_reason(f"{spec.tool} was called")
    return pass_reason(f"{spec.tool} was not called")


@_verdict.register
def _(spec: ToolSequence, context: MeasureContext) -> MeasureResult:
    called = [call.name for call in context.tool_calls]
    if spec.exact:
        fits = called == list(spec.tools)
    else:
        rest = iter(called)
        fits = all(tool in rest for tool in spec.tools)
    shown = ", ".join(called) or "nothing"
    return pass_reason(f"called {shown}") if fits else fail_reason(f"called {shown}")


@_verdict.register
def _(spec: NoToolErrors, context: MeasureContext) -> MeasureResult:  # noqa: ARG001
    if not context.tool_calls:
        return fail_reason("no tool was called")
    failed = next((call for call in context.tool_calls if call.error is not None), None)
    if failed:
        return fail_reason(f"{failed.name}: {failed.error}"[:500])
    return pass_reason(f"{len(context.tool_calls)} calls, no error")


@_verdict.register
def _(spec: LengthLimit, context: MeasureContext) -> MeasureResult:
    words = len(context.final.text.split())
    if 0 < words <= spec.max_words:
        return pass_reason(f"{words} words")
    return fail_reason(f"{words} words" if words else "there is no answer")


def _pair(field: str, context: MeasureContext, *, case_sensitive: bool) -> tuple[str, str]:
    expected = _plain(str(_expected(field, context)), case_sensitive=case_sensitive)
    if not expected:
        raise MissingExpectation(f"expect.{field} is empty")
    return expected, _plain(context.final.text, case_sensitive=case_sensitive)


def _expected(field: str, context: MeasureContext) -> Any:
    if context.expect.get(field) is None:
        raise MissingExpectation(f"the case has no expect.{field}")
    return context.expect[field]


def _plain(text: str, *, case_sensitive: bool) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text if case_sensitive else text.casefold()
