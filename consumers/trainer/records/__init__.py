"""What a run writes down: trackers, samples, evaluations and the machine it ran on."""
