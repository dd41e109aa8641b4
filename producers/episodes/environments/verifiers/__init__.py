"""Environments of the package verifiers: their tasks as a dataset, and an agent that plays them.

The package need not fit ours: program.py runs in an interpreter that has it, in both places.
"""

from pathlib import Path

PROGRAM = Path(__file__).parent / "program.py"
AGENT = f"{PROGRAM}:Verifiers"
