"""Prompts in, trajectories out."""
