"""Where user code runs: separate processes with limits, spoken to over a pipe.

In: a folder of code, calls as JSON. Out: results or typed failures; never an exception of theirs.
"""
