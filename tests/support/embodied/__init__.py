"""Environments with numbers for tests: processes of environments import them."""
