"""The flow of prompt groups: slots, journal, staleness, and the fenced trainer."""
