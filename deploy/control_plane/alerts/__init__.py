"""Watching a run: alerts, records in its folder, and notices to users."""
