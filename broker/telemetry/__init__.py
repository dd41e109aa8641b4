"""What people look at: figures, events and trajectories of a run, each in a bounded stream."""
