"""The optimizer step, and the critic's part in it."""
