"""What a step tells of itself: metrics, timing, trackers."""
