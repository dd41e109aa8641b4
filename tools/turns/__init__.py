"""A walk through turns on shared GPUs: the product's own locks, turns and checks under kills and stops, with GPUs that
are imitated, and faults planted in the product, which the walk must catch.

``python -m tools.turns --turns 1000 --seed 1``
"""
