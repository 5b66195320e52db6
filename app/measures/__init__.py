"""Measures tried on given rollouts, before any job does."""
