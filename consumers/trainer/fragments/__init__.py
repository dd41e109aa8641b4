"""Small policies that act in environments with numbers: networks, advantages and the optimizer step of PPO.

The step takes the place of that of tokens; ranks, checkpoints, weight versions and the loop around it are the same.
"""
