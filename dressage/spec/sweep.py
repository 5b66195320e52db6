"""Matched jobs: a base specification and a grid of values; then a table of what they reached."""

import copy
import json
from datetime import datetime
from itertools import product
from math import prod
from typing import Any, Self

from pydantic import Field, model_validator

from dressage.spec.base import Spec
from dressage.spec.status import JobStatus

MAX_JOBS = 200
SEED = "training.seed"


class SweepSpec(Spec):
    """Every combination of the grid's values becomes a job."""

    name: str = Field(min_length=1, max_length=150, pattern=r"^[^\x00-\x1f]+$")
    base: dict[str, Any] = Field(description="A job specification; its name is the sweep's.")
    grid: dict[str, list[Any]] = Field(
        min_length=1,
        description="Values by dotted field. `training.seed` makes repetitions of one arm.",
        examples=[{"training.seed": [0, 1, 2], "training.echo.coeff": [0, 0.05]}],
    )

    @model_validator(mode="after")
    def _of_some_size(self) -> Self:
        empty = [field for field, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]} has no values")
        for field, values in self.grid.items():
            seen = [json.dumps(value, sort_keys=True) for value in map(_plain, values)]
            if len(set(seen)) < len(seen):
                raise ValueError(f"grid.{field} has a value twice")
            inside = next((f for f in self.grid if f.startswith(f"{field}.")), None)
            if inside:
                raise ValueError(f"grid.{inside} is inside grid.{field}; give one of them")
        jobs = prod(map(len, self.grid.values()))
        if jobs > MAX_JOBS:
            raise ValueError(f"the grid makes {jobs} jobs; {MAX_JOBS} are the limit")
        return self

    def points(self) -> list[dict[str, Any]]:
        """Every combination, as value by field."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
        ]

    def job(self, point: dict[str, Any]) -> dict[str, Any]:
        """The specification of one combination.

        Raises:
            ValueError: A dotted field leads through something that has no fields.
        """
        spec = copy.deepcopy(self.base)
        for field, value in point.items():
            try:
                set_field(spec, field, value)
            except ValueError as error:
                raise ValueError(f"grid.{field}: {error}") from None
        shown = ", ".join(f"{field.rsplit('.', 1)[-1]}={value}" for field, value in point.items())
        return {**spec, "name": f"{self.name} [{shown}]"[:200]}


def set_field(spec: dict[str, Any], field: str, value: Any) -> None:
    """Put a value into a specification, under a dotted name.

    Raises:
        ValueError: It leads through something that has no fields.
    """
    *parents, last = field.split(".")
    for parent in parents:
        if spec.get(parent) is None:
            spec[parent] = {}
        spec = spec[parent]
        if not isinstance(spec, dict):
            raise ValueError(f"{parent!r} has no fields")
    spec[last] = value


def _plain(value: Any) -> Any:
    """A value as it is compared: 1 and 1.0 make the same job."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


class Interval(Spec):
    """A mean over repetitions with its 95 % Student-t interval; null for one, or for equal ones."""

    mean: float
    low: float | None
    high: float | None
    count: int


class SweepArm(Spec):
    """What the repetitions of one combination reached, on held-out cases."""

    values: dict[str, Any] = Field(description="The grid's values, without the seed.")
    jobs: tuple[str, ...]
    statuses: dict[JobStatus, int]
    pass_rate: Interval | None = Field(default=None, description="After training.")
    gain: Interval | None = Field(default=None, description="Of the pass rate, after − before.")
    reward: Interval | None = Field(default=None, description="Mean reward after training.")


class Sweep(Spec):
    """A sweep as the service shows it."""

    id: str
    team: str
    name: str
    grid: dict[str, list[Any]]
    arms: tuple[SweepArm, ...]
    created_at: datetime


class SweepDryRun(Spec):
    """What `POST /sweeps?dry_run=true` answers: every job checked, nothing stored."""

    jobs: int = Field(description="How many jobs the grid makes.")


class SweepPage(Spec):
    """One page of a list; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Sweep, ...]
    next_cursor: str | None = None
