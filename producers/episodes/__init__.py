"""Loops of our own: episodes that the generator plays itself, with tools or an environment, and without HTTP."""
