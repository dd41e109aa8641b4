"""Benchmarks of weights: how long a new version takes to reach every generator."""
