"""Trajectories in: rewards and training."""
