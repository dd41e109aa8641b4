"""The status of a run: collected from the broker, summed up, and shown to users and to Prometheus."""
