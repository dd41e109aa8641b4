"""Views of a run on a terminal."""
