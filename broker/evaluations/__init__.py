"""Evaluations on held-out prompts: their tasks and counts, their results, and samples of them to read."""
