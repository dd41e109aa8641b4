"""Configurations of other systems, converted.

A system has a table in ``tables/``, and a module for values that depend on each other.

Promises: what comes out is a configuration that `tidemill doctor` accepts or says in one line what it still lacks.
Each setting that was read is carried over, or named with its value and the reason (`conversion.Conversion`).
`python -m tools.convert_examples` measures both on a system's own examples.
"""
