"""Watching a run: alerts, what goes into its folder for later, and notices to people."""
