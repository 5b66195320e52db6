"""A suite looked at before it is uploaded: does its code load, and what do its measures say?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.authoring.suite import Suite
from dressage.measuring.runner import MeasureRunner
from dressage.measuring.session import sandboxed
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, Worker
from dressage.spec.measure import RewardSpec
from dressage.spec.suite import Case

GIVEN_FOR_NOTHING = 0.5
# What is said of a case: its expected values, and what solves nothing.
ANSWERS: dict[str, Callable[[Case], str]] = {
    "what is expected": lambda case: " ".join(texts_in(case.expect)),
    "nothing": lambda _: "",
    "the question": lambda case: str(case.conversation(None)[-1]["content"] or ""),
    "I do not know.": lambda _: "I do not know.",
}
EXPECTED = "what is expected"


@dataclass(frozen=True)
class SuiteCheck:
    """What was found.

    Attributes:
        suite: As it was read.
        contents: Names of tools, measures and others in its code.
        values: Mean value of each measure for each sample answer; None: it failed on all.
        failures: How measures failed, the first of each.
    """

    suite: Suite
    contents: dict[str, Any]
    values: dict[str, dict[str, float | None]]
    failures: dict[str, str]

    @property
    def given_for_nothing(self) -> list[tuple[str, str, float]]:
        """Measures that an answer satisfies that solves nothing: measure, answer, value."""
        return [
            (measure, answer, value)
            for measure, by_answer in self.values.items()
            for answer, value in by_answer.items()
            if answer != EXPECTED and value is not None and value >= GIVEN_FOR_NOTHING
        ]


def check_suite(path: Path, *, cases: int) -> SuiteCheck:
    """Load a suite in the sandbox, and try its measures on sample answers without tool calls.

    Args:
        path: A folder, an archive, or a file of cases.
        cases: The first so many are tried.

    Raises:
        SuiteError: Its cases or files are wrong.
        SandboxStartError: Its code does not load.
    """
    suite = Suite.from_path(path)
    with sandboxed(suite) as pool:
        return _tried(suite, pool, suite.cases[:cases])


def _tried(suite: Suite, pool: WorkerPool, cases: Sequence[Case]) -> SuiteCheck:
    measures = pool.sandbox.measures
    runner = MeasureRunner([RewardSpec(measure=name) for name in measures], pool, timeout=10)
    values: dict[str, dict[str, float | None]] = {name: {} for name in measures}
    failures: dict[str, str] = {}
    environments = [environment["name"] for environment in pool.sandbox.environments]
    for answer, text in ANSWERS.items():
        workers = [_world(pool, environments, case) for case in cases]
        found = runner.run([_context(case, text(case)) for case in cases], workers)
        for worker in workers:
            if worker:
                worker.kill()
        for name, outcomes in zip(measures, zip(*found, strict=True), strict=True):
            values[name][answer] = _mean(outcomes)
            failed = next((one.message for one in outcomes if one.failure), None)
            if failed:
                failures.setdefault(name, failed)
    runner.close()
    return SuiteCheck(suite, pool.sandbox.contents, values, failures)


def _world(pool: WorkerPool, environments: list[str], case: Case) -> Worker | None:
    """A fresh environment, of a suite that has one."""
    if len(environments) != 1:
        return None
    worker = pool.sandbox.start_worker()
    content = case.model_dump(mode="json", include={"input", "expect", "metadata"})
    request = {"call": "open", "name": environments[0], "case": {**content, "seed": 0}}
    worker.call({**request, "max_output": 10_000}, 10)
    return worker


def _context(case: Case, answer: str) -> MeasureContext:
    content = case.model_dump(mode="json")
    asked = case.conversation(None)
    return MeasureContext(
        input=content["input"],
        expect=content["expect"],
        metadata=content["metadata"],
        messages=[*asked, {"role": "assistant", "content": answer}],
        prompt_length=len(asked),
        final=AssistantMessage(answer),
    )


def _mean(outcomes: Sequence[Outcome]) -> float | None:
    known = [float(one.value["value"]) for one in outcomes if not one.failure]
    return fmean(known) if known else None


def texts_in(value: Any) -> list[str]:
    """Every text and number inside what a case expects."""
    if isinstance(value, dict):
        return texts_in(list(value.values()))
    if isinstance(value, list):
        return [text for item in value for text in texts_in(item)]
    return [] if value is None or isinstance(value, bool) else [str(value)]
