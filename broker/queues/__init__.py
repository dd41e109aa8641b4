"""The queues between services: tasks, scores, partial samples, dead letters."""
