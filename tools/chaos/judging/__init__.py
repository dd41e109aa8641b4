"""What the suite looks at, and what it makes of it."""
