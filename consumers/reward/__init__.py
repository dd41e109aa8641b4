"""The reward service: it scores trajectories in workers that can be killed."""
