"""Verdicts on finished rollouts: the suite's own measures, built-in ones, judges, functions.

In: rewards and contexts. Out: an outcome for each, never an exception of a measure's.
"""
