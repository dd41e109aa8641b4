"""Tidemill and TRL's GRPOTrainer on the same task, model and machine, in turns: ``python -m benchmarks.end_to_end``."""
