"""A worker's context with scripted children, and jobs for it."""

from tests.scripted import context, submit

__all__ = ["context", "submit"]
