"""The embedded sampler: decodes in the trainer's process, on its model or a copy of it. The default generator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import Completion, Request
from grpo_recipes.generation.megatron.decoder import Decoder, NewDecoder
from grpo_recipes.generation.megatron.draw import draw, uniform
from grpo_recipes.generation.megatron.rows import Rows

if TYPE_CHECKING:
    from grpo_recipes.policy.contract import WeightSpec


class MegatronSampler:
    """The Sampler contract by one batch that decodes in step, minimal on purpose: no paging, no CUDA graphs.

    All state but the key/value cache is a few tensors per request, so the cache may be thrown away at any token and
    made again by reading prompt and drawn tokens anew. That one move serves for new weights, sleep, and refilling the
    batch. New requests join when half of `max_batch_size` is free, so a sequence is read again about once on average.

    Nothing runs between two calls of `completions`. While paused its iterator ends; ask for a new one after `resume`.

    Args:
        new_decoder: makes an empty cache over the model.
        max_batch_size: sequences decoded at once.
        max_positions: most tokens of a sequence, prompt and completion together, that the model is made for.
        take_weights: loads one bucket of new weights (full tensors by Hugging Face name) into the model; None where the
            model is the trainer's own, so that it has them already.
        version: of the weights the model has now.
        device: where the model's logits are.
    """

    def __init__(
        self,
        new_decoder: NewDecoder,
        *,
        max_batch_size: int,
        max_positions: int,
        take_weights: Callable[[dict[str, Tensor]], None] | None = None,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._new_decoder = new_decoder
        self._max_batch_size, self._max_positions = max_batch_size, max_positions
        self._take_weights, self._version, self._device = take_weights, version, torch.device(device)
        self._queue: deque[Request] = deque()
        self._finished: deque[Completion] = deque()
        self._outstanding: set[int] = set()
        self._rows = Rows.of([], self._device)
        self._decoder: Decoder | None = None  # None: no cache, or one of other weights or other rows
        self._paused = self._asleep = False

    # -- the Sampler contract ----------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            UserError: a request that the model cannot serve; none of the requests is taken then.
            ValueError: a request id that is outstanding already.
        """
        for request in requests:
            self._check(request)
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._outstanding:
            raise ValueError("request ids must differ from one another and from those outstanding")
        self._outstanding |= ids
        self._queue.extend(requests)

    def completions(self) -> Iterator[Completion]:
        while True:
            while self._finished:
                completion = self._finished.popleft()
                self._outstanding.remove(completion.request_id)
                yield completion
            if self._paused or not self._outstanding:
                return
            self._draw_one_token()

    def poll(self, seconds: float, most: int = 64) -> list[Completion]:
        end = time.monotonic() + seconds
        found: list[Completion] = []
        while len(found) < most:
            if self._finished:
                found.append(self._finished.popleft())
                self._outstanding.remove(found[-1].request_id)
            elif self._paused or not self._outstanding or time.monotonic() >= end:
                break
            else:
                self._draw_one_token()
        return found

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = self._outstanding.intersection(request_ids)
        self._outstanding -= gone
        self._queue = deque(request for request in self._queue if request.request_id not in gone)
        self._finished = deque(completion for completion in self._finished if completion.request_id not in gone)
        for row, request in enumerate(self._rows.requests):
            if request.request_id in gone:
                self._rows.alive_B[row] = False
        self._compact()

    def pause(self) -> None:
        self._paused = True

    def resume(self, version: int) -> None:
        if version != self._version:  # weights shared with the trainer have changed under the cache
            self._version, self._decoder = version, None
        self._paused = False

    def update_weights(self, plan: Sequence[WeightSpec], buckets: Iterator[dict[str, Tensor]], version: int) -> None:
        """Collective where `buckets` is and the model is a copy: every rank reads them all. Else they are left unread."""
        if self._take_weights is not None:
            for bucket in buckets:
                self._take_weights(bucket)
        self._version, self._decoder = version, None

    def sleep(self) -> None:
        self._decoder = None
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    # -- one token -----------------------------------------------------------------------------------------------
    # A decorator here and not a `with` around the loop: a suspended generator would leave the caller without gradients.
    # Not inference_mode: what Megatron caches of a forward pass must stay usable in training.
    @torch.no_grad()
    def _draw_one_token(self) -> None:
        if self._asleep:
            raise RuntimeError("the sampler is asleep: call wake() before asking for completions")
        # Not held during the step: an exception in it must not leave a cache that disagrees with the rows.
        decoder, self._decoder = self._decoder, None
        if self._queue and 2 * int(self._rows.alive_B.sum()) <= self._max_batch_size:
            decoder = None
        if decoder:
            logits_BV = decoder.step(self._rows.last_tokens())
        else:
            decoder, logits_BV = self._start()
        rows = self._rows
        tokens_B, logprobs_B = draw(logits_BV, rows.temperatures_B, uniform(rows.seeds_B, rows.counts_B))
        finished = rows.append(tokens_B, logprobs_B, self._version)
        self._decoder = decoder
        if len(finished):
            self._finished.extend(rows.completions(finished))
            self._compact()

    def _compact(self) -> None:
        """Drop finished rows once a quarter of the batch is finished: a copy of the cache costs about one step."""
        living = self._rows.alive_B.nonzero()[:, 0]
        if 4 * len(living) <= 3 * len(self._rows):
            self._rows = self._rows.select(living)
            if not len(living):
                self._decoder = None
            elif self._decoder:
                self._decoder.select(living)

    def _start(self) -> tuple[Decoder, Tensor]:
        """Fill the batch from the queue and read all its tokens into a new cache; with it the logits after them."""
        living = self._rows.select(self._rows.alive_B.nonzero()[:, 0])
        new = list(islice(self._queue, self._max_batch_size - len(living)))
        self._rows = living.join(Rows.of(new, self._device))
        for _ in new:
            self._queue.popleft()
        return self._prefill()

    def _prefill(self) -> tuple[Decoder, Tensor]:
        """Each distinct sequence is read once, however many samples start from it."""
        rows = self._rows
        prefixes = rows.prefixes()
        place: dict[tuple[int, ...], int] = {}
        for prefix in prefixes:
            place.setdefault(prefix, len(place))
        longest = max(map(len, place))
        padded = torch.tensor([(0,) * (longest - len(prefix)) + prefix for prefix in place], device=self._device)
        pad_lengths = torch.tensor([longest - len(prefix) for prefix in place], device=self._device)
        decoder = self._new_decoder(
            max_batch_size=len(rows), max_sequence_length=longest + int((rows.limits_B - rows.counts_B).max())
        )
        logits_UV = decoder.prefill(padded, pad_lengths)
        if len(place) == len(rows):
            return decoder, logits_UV
        copies = torch.tensor([place[prefix] for prefix in prefixes], device=self._device)
        decoder.select(copies)
        return decoder, logits_UV[copies]

    def _check(self, request: Request) -> None:
        sampling, prompt = request.sampling, len(request.prompt_ids)
        if not prompt:
            raise UserError("a prompt has no tokens", where="prompt", mend="give every prompt at least one token")
        if sampling.max_new_tokens < 1:
            raise UserError(
                f"{sampling.max_new_tokens} tokens cannot be generated",
                where="policy.generation.max_new_tokens",
                mend="set it to 1 or more",
            )
        if not 0 <= sampling.temperature < float("inf"):
            raise UserError(
                f"{sampling.temperature} is not a temperature",
                where="policy.generation.temperature",
                mend="set it to 0 (greedy) or more",
            )
        if prompt + sampling.max_new_tokens > self._max_positions:
            raise UserError(
                f"a prompt of {prompt} tokens and {sampling.max_new_tokens} new ones exceed the model's "
                f"{self._max_positions} positions",
                where="policy.generation.max_new_tokens",
                mend=f"set it to {max(self._max_positions - prompt, 0)} or less, or filter prompts by "
                "data.max_input_seq_length",
            )
