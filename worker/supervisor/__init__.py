"""Runs one piece of leased work: claim → spawn → relay → settle. Never loads torch.

In: a lease. Out: a child process with a run directory, and what it says stored under the lease.
"""
