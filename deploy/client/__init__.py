"""Clients of a running system: over REST, or straight from its broker."""
