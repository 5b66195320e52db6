"""Why a run ends without a result."""

from dressage.spec.status import Reason


class RunFailure(Exception):
    """Stops the run with a reason from the closed set and a sentence for the user."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
