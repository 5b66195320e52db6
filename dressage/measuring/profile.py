"""What admission knows of a suite's cases without reading them again."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from pydantic import Field

from dressage.sandbox.numbers import last_number
from dressage.spec.base import Spec
from dressage.spec.suite import Case

MAX_IDS, MAX_FIELDS = 5, 200
MAX_NUMBER = 10_000  # characters of a text in which a number is looked for


class SomeCases(Spec):
    """Cases that have something in common: how many, and the ids of the first."""

    count: int = 0
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[str]) -> "SomeCases":
        """Of all their ids."""
        every = list(ids)
        return cls(count=len(every), ids=tuple(every[:MAX_IDS]))

    def __str__(self) -> str:
        """For a sentence."""
        more = f" and {self.count - len(self.ids)} more" if self.count > len(self.ids) else ""
        return ", ".join(map(repr, self.ids)) + more


class ExpectField(Spec):
    """One entry of the cases' `expect`."""

    missing: SomeCases = Field(description="Cases without it, or with null or an empty text.")
    no_numbers: SomeCases = Field(description="Cases whose entry is no number.")


class SuiteProfile(Spec):
    """Counts over all cases of one version."""

    cases: int
    places: dict[int, int] = Field(description="How many cases have which `Case.place`.")
    repeated: SomeCases = Field(description="Cases that ask and expect what an earlier one does.")
    with_system: SomeCases = Field(description="Cases whose input has a system message.")
    both: tuple[str, ...] = Field(
        default=(), description="Names that are in `expect` and in `metadata` of a case."
    )
    expect: dict[str, ExpectField] | None = Field(description="Null: too many different entries.")

    @classmethod
    def of(cls, cases: Sequence[Case]) -> "SuiteProfile":
        """Look at every case once."""
        expect = _expectations(cases)
        seen: set[str] = set()
        repeated = []
        for case in cases:
            if case.content_hash in seen:
                repeated.append(case.id)
            seen.add(case.content_hash)
        return cls(
            cases=len(cases),
            places=Counter(case.place for case in cases),
            repeated=SomeCases.of(repeated),
            with_system=SomeCases.of(c.id for c in cases if c.system_message is not None),
            both=tuple(sorted({n for c in cases for n in c.expect.keys() & c.metadata.keys()}))[
                :MAX_IDS
            ],
            expect=expect if len(expect) <= MAX_FIELDS else None,
        )

    def for_training(self, boundary: int) -> int:
        """Cases on the training side of a boundary."""
        return sum(count for place, count in self.places.items() if place >= boundary)


def _expectations(cases: Sequence[Case]) -> dict[str, ExpectField]:
    """Every entry of `expect`, in one pass over cases that may be many."""
    there: Counter[str] = Counter()
    no_numbers: dict[str, list[str]] = {}
    for case in cases:
        for name, value in case.expect.items():
            wrong = no_numbers.setdefault(name, [])
            if type(value) in (int, float):
                there[name] += 1
                continue
            text = str(value)
            is_there = _is_there(value)
            there[name] += is_there
            if is_there and len(text) <= MAX_NUMBER and last_number(text) is None:
                wrong.append(case.id)
    return {
        name: ExpectField(
            missing=SomeCases(
                count=len(cases) - there[name],
                ids=() if there[name] == len(cases) else _first_without(name, cases),
            ),
            no_numbers=SomeCases.of(wrong),
        )
        for name, wrong in sorted(no_numbers.items())
    }


def _first_without(name: str, cases: Sequence[Case]) -> tuple[str, ...]:
    without = (case.id for case in cases if not _is_there(case.expect.get(name)))
    return tuple(islice(without, MAX_IDS))


def _is_there(value: object) -> bool:
    return value is not None and bool(unicodedata.normalize("NFKC", str(value)).strip())
