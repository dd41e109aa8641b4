"""Records of a run: trackers, samples, evaluations and the machine it ran on."""
