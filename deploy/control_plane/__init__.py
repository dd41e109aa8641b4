"""The control plane: the status of a run over REST and server-sent events, and orders to it."""
