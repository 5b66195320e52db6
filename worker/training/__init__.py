"""The training library: a run directory in; events, checkpoints, artifacts and a manifest out.

Runs as its own process, `python -m worker.training RUN_DIR`, without any server.
Not here: the queue, the database, the web.
"""
