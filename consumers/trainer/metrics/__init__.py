"""Figures of each step: metrics, timing, trackers."""
