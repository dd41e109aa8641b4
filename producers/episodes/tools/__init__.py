"""Tools that a policy calls during an episode: Python functions, MCP servers, a Python interpreter."""
