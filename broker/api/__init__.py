"""The control plane: what a run does and why, over REST and server-sent events, and orders to it."""
