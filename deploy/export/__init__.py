"""Commands on what a run has saved: exported models, recorded batches and replays of steps."""
