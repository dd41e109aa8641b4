"""The parts of ``tidemill bench agents``: episodes at once, the endpoint, and the tokens to train."""
