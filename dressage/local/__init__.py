"""The service on one machine: databases, API, workers and scheduler under one supervisor.

In: a data directory and a port. Out: running processes and one address. It starts programs
(`programs`) and imports none of them.
"""
