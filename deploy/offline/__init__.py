"""Work that needs no broker: warm start, preference training, evaluation, export, replay, tiny models."""
