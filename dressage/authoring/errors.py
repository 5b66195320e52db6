"""What is refused of a suite, always by the name of the offender."""

from dataclasses import dataclass

MAX_REPORTED = 100


class AuthoringError(Exception):
    """Base of every refusal of user-written tools, measures and suites."""


class ToolDefinitionError(AuthoringError):
    """A function cannot be offered to a model as a tool."""


class MeasureDefinitionError(AuthoringError):
    """A function cannot be used as a measure."""


class MeasureTypeError(TypeError):
    """A measure gave back something that is no verdict."""


class ScoreRangeError(ValueError):
    """A score lies outside its range."""


class UnknownAnnotationError(ToolDefinitionError):
    """An annotation names something that is not there, or not there yet."""


class ToolArgumentsError(AuthoringError):
    """Arguments written by the model do not fit the tool's schema."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a suite.

    Attributes:
        message: What, and what to do.
        file: The file inside an archive, or None.
        line: Counted from 1; for JSON arrays and records, the position of the case.
    """

    message: str
    file: str | None = None
    line: int | None = None


class SuiteError(AuthoringError):
    """A suite that cannot be stored. `problems` has every line that is wrong (the first 100)."""

    def __init__(self, problems: list[Problem]) -> None:
        self.total = len(problems)
        self.problems = problems[:MAX_REPORTED]
        first = problems[0]
        where = f"{first.file or 'line'} {first.line}: " if first.line else ""
        more = f" (and {self.total - 1} more)" if self.total > 1 else ""
        super().__init__(f"{where}{first.message}{more}")
