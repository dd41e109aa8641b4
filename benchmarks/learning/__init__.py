"""Training runs whose curves are compared: staleness, curricula, rewards of turns, routing."""
