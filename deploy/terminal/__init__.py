"""What the terminal shows of a run."""
