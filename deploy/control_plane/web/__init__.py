"""Layers that every request passes: tokens and origins, problem documents, event streams."""
