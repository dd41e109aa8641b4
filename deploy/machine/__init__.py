"""This machine: what it has, and what is installed on it."""
