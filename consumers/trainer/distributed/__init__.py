"""Several trainer processes: collectives, the command channel, the watchdog, turns on shared GPUs."""
