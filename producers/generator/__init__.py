"""The generator service: pulls tasks, runs the workflow on the engine, streams trajectories, follows the weights."""
