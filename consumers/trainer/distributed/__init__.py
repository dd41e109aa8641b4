"""Several trainer processes: collectives, the command channel, the watchdog, state in main memory."""
