"""Judges one response with math-verify. Runs in a GraderPool, which ends it when it takes too long."""

from __future__ import annotations

from itertools import product
from typing import Any

from math_verify import parse, verify


def grade(answer: str, response: str) -> float:
    """1.0 if any expression read from the response equals the reference answer, else 0.0.

    Raises:
        ValueError: the reference answer is no mathematics.
        Exception: whatever a comparison raised, if no other one succeeded.
    """
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer
    golds = _parse(answer if marked else f"\\boxed{{{answer}}}")
    if not golds:
        raise ValueError(f"the reference answer {answer[:80]!r} cannot be parsed")
    failure: Exception | None = None
    for gold, found in product(golds, _parse(response)):
        try:
            # The library's own deadlines rest on SIGALRM and turn an overrun into "wrong".
            if verify(gold, found, timeout_seconds=None, raise_on_error=True):
                return 1.0
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return 0.0


def _parse(text: str) -> list[Any]:
    """Expressions found in the text; without the fallback to plain strings, which equal no expression."""
    found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    return found
