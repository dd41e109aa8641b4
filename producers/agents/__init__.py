"""Agents: programs of the user that talk to the policy over HTTP, and whose model calls become one sample."""
