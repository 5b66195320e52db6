"""Sweeps: a grid in, matched jobs and their table out."""
