"""The parts of ``tidemill bench rewards``: programs in sandboxes, judges that fail at times, batched reward models."""
