"""The connection to the server: URLs, keys, scripts, users, and the embedded server."""
