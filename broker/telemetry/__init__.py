"""Telemetry of a run for people: figures, events and trajectories, each in a bounded stream."""
