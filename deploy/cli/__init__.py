"""The command line: ``tidemill``."""
