"""Checks of a configuration before a run starts: names, files, data, user code, model."""
