"""Exports of trained jobs: asked for, checked, leased to a worker, settled.

In: an export specification of a job. Out: rows with a status, and the end of the job with its last
export. Not here: making the files (worker.training.export).
"""
