"""Benchmarks of single services: transport, generator, trainer, control plane, scaling."""
