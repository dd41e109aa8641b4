"""What Tidemill costs and how well it learns, measured: ``tidemill bench`` and ``python -m benchmarks.NAME``."""
