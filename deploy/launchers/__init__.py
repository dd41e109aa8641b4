"""Ways to start a run on engines that people already have. The local one is deploy/supervisor.py."""
