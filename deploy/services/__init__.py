"""The entry of every service process."""
