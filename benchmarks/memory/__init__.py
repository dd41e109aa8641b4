"""Peak memory of loading a model and of offline training."""
