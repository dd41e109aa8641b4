"""Commands that train or evaluate without a broker, and the tiny models of examples, benchmarks and tests."""
