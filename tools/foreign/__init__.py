"""Losses of other systems by their own code, for the test that compares ours; see __main__.py."""
