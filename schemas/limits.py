"""Limits that messages and the REST API share."""

LARGEST_REWARD = 1e30
"""Largest absolute value of a reward."""
