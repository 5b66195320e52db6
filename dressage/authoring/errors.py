"""What is refused when a suite's code is loaded, always by the name of the offender."""


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


class ToolArgumentsError(AuthoringError):
    """Arguments written by the model do not fit the tool's schema."""
