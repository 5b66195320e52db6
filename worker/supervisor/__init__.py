"""Runs one piece of work: claim → spawn → relay → settle. Never loads torch."""
