"""`python -m app.admin.NAME`: run before the service starts; what is wrong is a sentence."""
