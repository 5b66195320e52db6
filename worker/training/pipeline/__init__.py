"""The map of a run: load → build → look before → evaluate → train → evaluate → save → manifest.

In: a run directory. Out: its manifest. Not here: how any of it is done.
"""
