"""Processes and files: guarded child processes, sandboxes, signals, atomic writes, locks of shared GPUs."""
