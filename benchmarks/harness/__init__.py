"""Processes, random work and tables that the benchmarks share."""
