"""The supervisor: it starts services, restarts them, scales them and ends them."""
