"""The processes that reward functions run in."""
