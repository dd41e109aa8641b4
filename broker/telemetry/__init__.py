"""Telemetry of a run: heartbeats, and bounded streams of events, metrics and trajectories.

Losing an entry harms no training, and an entry may come twice after a lost answer.
"""
