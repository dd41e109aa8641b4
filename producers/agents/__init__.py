"""Agents: users' programs that call the policy over HTTP, and whose model calls become one sample."""
