"""Sweeps: a learning-rate search at every point of a grid of runs, for any recipe."""
