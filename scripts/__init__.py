"""Programs of the repository that no package needs: set-up and pinned versions."""
