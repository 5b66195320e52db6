"""Rollouts in, verdicts and rewards out.

A measure that fails is an infrastructure failure: the reward is missing, never 0.
"""
