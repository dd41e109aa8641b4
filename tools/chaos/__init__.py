"""The chaos suite: a real system under random faults, judged by logs that the system's own ledger never sees.

``python -m tools.chaos --minutes 3 --seed 1``
"""
