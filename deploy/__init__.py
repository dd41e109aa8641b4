"""How Tidemill is started."""
