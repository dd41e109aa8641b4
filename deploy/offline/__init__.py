"""Commands that need no broker: warm start, preference training, evaluation, export, replay."""
