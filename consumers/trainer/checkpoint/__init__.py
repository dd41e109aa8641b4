"""Checkpoints and recorded batches as folders of files."""
