"""From trajectories to micro-batches of equal work."""
