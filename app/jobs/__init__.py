"""Jobs: submitted, looked at, changed, followed, forgotten.

In: specifications and requests. Out: rows with a status and a history. Not here: who runs them
(app.scheduling), their exports (app.exports), and the one writer of their status (app.lifecycle).
"""
