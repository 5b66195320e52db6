"""Suites: a file in, an immutable version out, or every line that is wrong."""
