"""Whether the rewards of a job can be measured."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import UnknownDialect, specification_with

from app.db.models import SuiteRow
from app.exceptions import FieldProblem
from dressage.measuring.profile import SuiteProfile
from dressage.sandbox.patterns import compile_pattern
from dressage.spec.measure import (
    Contains,
    ExactMatch,
    JsonSchema,
    NumericCloseness,
    RegexMatch,
    RewardSpec,
)

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Their schemas look at the same value as the schema that they are in.
SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


def unknown_rewards(rewards: Sequence[RewardSpec], suite: SuiteRow) -> list[FieldProblem]:
    """Measures and reward functions that the suite does not have."""
    version = f"{suite.name}@{suite.version}"
    problems = [
        FieldProblem(
            field=f"rewards.{at}.function",
            message=f"there is no reward function {reward.function!r} in {version}; it has "
            f"{listed(suite.reward_functions)}",
        )
        for at, reward in enumerate(rewards)
        if reward.function is not None and reward.function not in suite.reward_functions
    ]
    problems += [
        FieldProblem(
            field=f"rewards.{at}.measure",
            message=f"there is no measure {reward.measure!r} in {version}; it has "
            f"{listed(suite.measures)}",
        )
        for at, reward in enumerate(rewards)
        if isinstance(reward.measure, str) and reward.measure not in suite.measures
    ]
    return problems


def bad_rewards(rewards: Sequence[RewardSpec]) -> list[FieldProblem]:
    """Schemas and patterns of rewards that cannot work."""
    problems = []
    for at, reward in enumerate(rewards):
        if isinstance(reward.measure, JsonSchema):
            problem, part = schema_problem(reward.measure.json_schema), "schema"
        elif isinstance(reward.measure, RegexMatch):
            problem, part = pattern_problem(reward.measure.pattern), "pattern"
        else:
            continue
        if problem:
            problems.append(FieldProblem(field=f"rewards.{at}.measure.{part}", message=problem))
    return problems


def unmet_expectations(rewards: Sequence[RewardSpec], profile: SuiteProfile) -> list[FieldProblem]:
    """Cases that lack what a built-in measure compares answers with, or have it in another form."""
    if profile.expect is None:
        return []
    problems = []
    for at, reward in enumerate(rewards):
        measure = reward.measure
        if not isinstance(measure, ExactMatch | Contains | NumericCloseness):
            continue
        entry = profile.expect.get(measure.field)
        if entry is None:
            have = listed(profile.expect)
            message = f"no case has expect.{measure.field}; the cases have {have}"
        elif entry.missing.count:
            message = (
                f"{entry.missing.count} of {profile.cases} cases have no expect.{measure.field}: "
                f"{entry.missing}"
            )
        elif isinstance(measure, NumericCloseness) and entry.no_numbers.count:
            message = (
                f"expect.{measure.field} is no number in {entry.no_numbers.count} of "
                f"{profile.cases} cases: {entry.no_numbers}"
            )
        else:
            continue
        problems.append(FieldProblem(field=f"rewards.{at}.measure.field", message=message))
    return problems


def pattern_problem(pattern: str) -> str | None:
    """Why a regular expression cannot be run, if it cannot."""
    try:
        compile_pattern(pattern)
    except ValueError as error:
        return str(error)
    return None


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why nothing can be checked with a JSON schema, if nothing can."""
    try:
        validator = validator_for(schema, default=Draft202012Validator)
        validator.check_schema(schema)
        resource = Resource.from_contents(
            schema, default_specification=specification_with(str(validator.META_SCHEMA["$id"]))
        )
        resolver = Registry().with_resource("", resource).resolver()
        _Walk(resolver.lookup).everything(schema)
    except SchemaError as error:
        return f"not a JSON schema: {error.json_path}: {error.message}"[:500]
    except (Unresolvable, UnknownDialect) as error:
        return f"{getattr(error, 'ref', '$schema')!r} is not in the schema; a $ref must stay inside"
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "the schema is nested too deeply"
    return None


class _Walk:
    """Looks at each schema of a schema once, and where its references lead."""

    def __init__(self, lookup: Callable[[str], Any]) -> None:
        self._lookup = lookup
        self._open: set[int] = set()  # by identity: what is looked at now, and what has been
        self._done: set[int] = set()

    def everything(self, part: Any) -> None:
        """A schema with all that it holds.

        Raises:
            ValueError: A pattern is none, or a schema needs itself for the same value.
            Unresolvable: A reference leads nowhere, or outside.
        """
        if isinstance(part, list):
            for item in part:
                self.everything(item)
        if not isinstance(part, dict):
            return
        for pattern in (part.get("pattern"), *_keys(part.get("patternProperties"))):
            problem = pattern_problem(pattern) if isinstance(pattern, str) else None
            if problem:
                raise ValueError(f"pattern {pattern!r}: {problem}")
        self._same_value(part)
        for name, value in part.items():
            if name not in ("const", "enum", "default", "examples"):
                self.everything(value)

    def _same_value(self, part: Any) -> None:
        if not isinstance(part, dict) or id(part) in self._done:
            return
        if id(part) in self._open:
            raise ValueError("a $ref leads back to itself, without anything between")
        self._open.add(id(part))
        for name in SAME_VALUE:
            schemas = part.get(name)
            for schema in schemas if isinstance(schemas, list) else [schemas]:
                self._same_value(schema)
        for name in REFERENCES:
            if isinstance(part.get(name), str):
                self._same_value(self._lookup(part[name]).contents)
        self._open.remove(id(part))
        self._done.add(id(part))


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names) or "none"
