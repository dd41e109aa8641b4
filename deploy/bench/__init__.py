"""``tidemill bench``: what the broker costs, against the fastest that the same server can do."""
