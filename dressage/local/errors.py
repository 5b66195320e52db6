"""Why the service does not start: always a sentence for the person at the terminal."""


class LaunchError(Exception):
    """The service cannot start, or did not come up."""
