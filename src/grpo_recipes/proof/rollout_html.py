"""Rollouts as HTML. What a model wrote is untrusted: all of it goes through `safe`."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from html import escape

from grpo_recipes.proof.charts import number
from grpo_recipes.runs.rollouts import Rollout

MAX_TOKENS, MAX_CHARACTERS = 1200, 8000  # shown of one response, so that the page of a 16K recipe still opens
FULL_MARK = 4.0  # nats at which a token is marked fully: a probability below 2 %


def safe(text: object) -> str:
    """Escaped for HTML; control, direction and half characters, which could upset page or reader, made visible."""
    keep = "\n\t\u200c\u200d"  # joiners belong to the spelling of some scripts and of emoji
    shown = (c if c in keep or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "\ufffd" for c in str(text))
    return escape("".join(shown))


def rollout_card(rollout: Rollout) -> str:
    facts = [
        f"reward <b>{'none' if rollout.reward is None else number(rollout.reward)}</b>",
        f"advantage {'none' if rollout.advantage is None else number(rollout.advantage)}",
        f"finish: {safe(rollout.finish_reason)}",
    ]
    if rollout.token_ids:
        facts.append(f"{len(rollout.token_ids)} tokens")
    if rollout.logprobs:
        facts.append(f"mean logprob {number(sum(rollout.logprobs) / len(rollout.logprobs))}")
    if rollout.trainer_logprobs and len(rollout.trainer_logprobs) == len(rollout.logprobs):
        gap = max(abs(a - b) for a, b in zip(rollout.logprobs, rollout.trainer_logprobs, strict=True))
        facts.append(f"largest difference to the trainer {number(gap)}")
    if rollout.mult_prob_error is not None:
        facts.append(f"mean exp |difference| {number(rollout.mult_prob_error)}")
    if rollout.row is not None:
        facts.append(f"row {rollout.row}")
    if rollout.answer:
        facts.append(f"answer: {safe(rollout.answer)}")
    if rollout.error:
        facts.append(f"grader: {safe(rollout.error)}")
    return (
        f'<div class="rollout"><pre class="soft">{_cut(rollout.prompt)}</pre><pre>{_response(rollout)}</pre>'
        f'<div class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</div></div>'
    )


def chosen(rollouts: Sequence[Rollout], count: int = 6) -> list[Rollout]:
    """Those that say most: failed gradings first, then best and worst by turns; the order of the file among equals."""
    failed = [r for r in rollouts if r.reward is None]
    ranked = sorted((r for r in rollouts if r.reward is not None), key=lambda r: -(r.reward or 0.0))
    picked = failed[:1]
    while ranked and len(picked) < count:
        picked.append(ranked.pop(0))
        if ranked and len(picked) < count:
            picked.append(ranked.pop())
    return picked


def _response(rollout: Rollout) -> str:
    if not rollout.tokens or len(rollout.tokens) != len(rollout.logprobs):
        return _cut(rollout.response)
    spans = [
        _token(text, logprob, token_id)
        for text, logprob, token_id in zip(
            rollout.tokens[:MAX_TOKENS], rollout.logprobs, rollout.token_ids or rollout.tokens, strict=False
        )
    ]
    left_out = len(rollout.tokens) - MAX_TOKENS
    return "".join(spans) + (f"\n… {left_out} more tokens" if left_out > 0 else "")


def _token(text: str, logprob: float, token_id: object) -> str:
    """Marked the stronger, the less likely the token was."""
    surprise = min(max(0.0, -logprob / FULL_MARK), 1.0) if math.isfinite(logprob) else 1.0
    tip = f"token {safe(token_id)}, logprob {logprob:.4g}, probability {math.exp(min(logprob, 0.0)):.3g}"
    colour = f"background:rgba(var(--mark),{surprise * 0.75:.2f})"
    return f'<span class="tok" style="{colour}" title="{tip}">{safe(text)}</span>'


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return safe(text[:MAX_CHARACTERS]) + (f"\n… {left_out} more characters" if left_out > 0 else "")
