"""Observation of a run, and the verdict on it."""
