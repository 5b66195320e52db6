"""The contract: what a client sends and what the service answers.

In and out: frozen pydantic models. Not here: torch, web server, database.
"""
