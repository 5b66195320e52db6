"""How the service's processes log: one line an event, and plain stack traces."""

import structlog


def configure_logs() -> None:
    """Set up structlog. Its default draws a trace with all variables, which takes seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
    )
