"""What the engine asks of a sampler: a stream of requests in, a stream of completions out. Token ids both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the trainer mirrors it exactly. temperature 0 means greedy (logprobs at temperature 1)."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    request_id: int
    prompt_ids: tuple[int, ...]
    seed: int  # of this one sample: the draw does not depend on what else is in the batch
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """R generated tokens; a stop token is the last of them and is trained on."""

    request_id: int
    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R], natural log, of each drawn token under the distribution it was drawn from
    weight_versions: Tensor  # int32 [R], version of the weights each token was drawn by
    finish_reason: FinishReason


class GeneratorDied(RuntimeError):
    """A process of the generator is gone, and with it the requests it had."""


class GeneratorStalled(RuntimeError):
    """It lives, but what it was asked for does not come."""


class Generator(Protocol):
    """What the engine sees: one stream, however many samplers there are behind it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; returns at once."""

    def completions(self) -> Iterator[Completion]:
        """Yields each completion as it finishes, until no submitted request is outstanding."""

    def poll(self, seconds: float) -> list[Completion]:
        """What finishes within so many seconds; returns earlier with a part of it, or where nothing is outstanding."""

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget these requests, wherever they are: none of them arrives after this. Ids that are not outstanding are
        ignored."""

    def pause(self) -> None:
        """Stop drawing after the current token; unfinished requests keep their state."""

    def resume(self, version: int) -> None:
        """Go on drawing; tokens drawn from now on carry `version`."""

    def sleep(self) -> None:
        """Give device memory back."""

    def wake(self) -> None:
        """Undo `sleep`."""


class Sampler(Generator, Protocol):
    """One that is handed its weights: what a rank of the embedded generator holds."""

    def update_weights(self, plan: Sequence[WeightSpec], buckets: Iterator[dict[str, Tensor]], version: int) -> None:
        """Load new weights, forget every cached prefix, and take `version`."""


def generate(generator: Generator, requests: Sequence[Request]) -> list[Completion]:
    """Submit, wait for all, and return completions in the order of the requests."""
    generator.submit(requests)
    done = {completion.request_id: completion for completion in generator.completions()}
    return [done[request.request_id] for request in requests]
