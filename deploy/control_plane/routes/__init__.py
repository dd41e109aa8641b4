"""The routes of the REST API: what can be read, what can be ordered."""
