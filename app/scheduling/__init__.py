"""Who runs what, and where: one plan that workers claim by and the service explains by.

In: rows of jobs, workers, teams and attempts (`snapshot`). Out: placements (`plan`), leases and
reasons to wait. Not here: what happens to a job on request (app.jobs), and exports (app.exports).
"""
