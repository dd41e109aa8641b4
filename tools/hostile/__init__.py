"""Programs that try to get out of the sandbox, to stay, or to harm their neighbours: ``python -m tools.hostile``."""
