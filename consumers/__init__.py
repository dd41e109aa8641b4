"""Consumers of trajectories: rewards and training."""
