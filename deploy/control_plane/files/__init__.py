"""Runs as their folders show them: metrics, groups, evaluations, logs and configuration, without a broker."""
