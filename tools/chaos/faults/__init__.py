"""What the suite does to the system: kinds of faults, by what they hit."""
