"""Conversations of agents: model calls, joined to the token sequences that are trained, without I/O."""
