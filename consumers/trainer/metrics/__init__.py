"""Metrics of each step: metrics, timing, trackers."""
