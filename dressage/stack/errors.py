"""Why the stack does not start: always a sentence for the person at the terminal."""


class StackError(Exception):
    """The stack cannot start, or did not come up."""
