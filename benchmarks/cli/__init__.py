"""The commands of ``tidemill bench``: what they take, and what they show."""
