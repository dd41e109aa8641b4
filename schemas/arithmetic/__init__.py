"""The arithmetic of exact mode, which generators and the trainer share: nothing depends on what else is computed."""
