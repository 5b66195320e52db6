"""Celery as the wire to workers: a message says only "look". The truth is in Postgres."""
