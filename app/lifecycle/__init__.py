"""Who writes a status, with its event and its webhook messages in the same transaction.

In: locked rows. Not here: who may ask for a change (services), and leases (app.scheduling).
"""
