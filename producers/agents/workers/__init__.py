"""The processes that agents run in."""
