"""Webhooks: made by the API, sent by the scheduler. Messages are stored by app.lifecycle."""
