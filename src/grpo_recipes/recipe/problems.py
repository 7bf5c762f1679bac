"""Mistakes in a recipe, gathered so that a user sees all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_recipes.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One mistake: where (a dotted key, a file), what is wrong, what to do about it."""

    where: str
    message: str
    mend: str


def raise_problems(problems: Sequence[Problem], subject: str) -> None:
    """Raise one UserError for all problems; do nothing if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0].message, where=problems[0].where, mend=problems[0].mend)
    listed = "".join(f"\n- {p.where}: {p.message}\n  -> {p.mend}" for p in problems)
    raise UserError(f"{len(problems)} mistakes in {subject}:{listed}")


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates that resemble `name` most, best first; at most `count`, none if none is close."""
    return difflib.get_close_matches(name, list(dict.fromkeys(candidates)), n=count, cutoff=0.6)
