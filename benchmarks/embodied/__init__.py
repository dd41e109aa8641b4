"""Environments with numbers beside Stable-Baselines3."""
