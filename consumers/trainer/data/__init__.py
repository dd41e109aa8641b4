"""Micro-batches of equal work from trajectories."""
