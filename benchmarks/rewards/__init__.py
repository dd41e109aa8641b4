"""The parts of ``tidemill bench rewards``: programs in sandboxes, judges that fail sometimes, batched reward models."""
