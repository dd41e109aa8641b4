"""A run from Python: functions and data become files that other processes read; a handle watches and orders the run."""
