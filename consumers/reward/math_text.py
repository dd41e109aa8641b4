"""Mathematical equality of answers written in LaTeX or plain text, by math-verify.

Its own time limits turn a slow comparison into "wrong"; they are off, the worker's deadline counts.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any


def equal(gold: str, completion: str, boxed_only: bool) -> bool:
    """Whether the completion's answer equals ``gold``. ValueError if ``gold`` is no mathematics."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    parsed_gold = _parse_gold(gold)
    # Of several boxes the last one counts; math-verify would join them to a set.
    box = completion.rfind("\\boxed")
    if box < 0 and boxed_only:
        return False
    text = completion[box:] if box >= 0 else completion
    # Priority 0 puts the box before everything after it.
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found = parse(text, configs, parsing_timeout=None)
    return bool(verify(parsed_gold, found, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> Any:
    from math_verify import parse

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    marked = "$" in gold or "\\boxed" in gold or "\\(" in gold or "\\[" in gold
    parsed = parse(gold if marked else f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"reference answer {gold[:60]!r} is not an expression that math-verify reads")
    return parsed
