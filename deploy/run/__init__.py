"""``tidemill up``: a whole run on this machine."""
