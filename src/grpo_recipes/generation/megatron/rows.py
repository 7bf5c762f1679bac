"""The state of the sequences that are being decoded, as tensors with one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_recipes.generation.contract import Completion, Request

NO_TOKEN = -1  # fills unused places of stops_BK


@dataclass
class Rows:
    """B requests; at most N new tokens, at most K stop tokens each. Never needs the model."""

    requests: list[Request]
    seeds_B: Tensor  # int64
    temperatures_B: Tensor  # float32
    limits_B: Tensor  # int64, max_new_tokens
    stops_BK: Tensor  # int64
    counts_B: Tensor  # int64, tokens drawn so far
    alive_B: Tensor  # bool, false once finished; such rows are dropped by `select` when it pays
    tokens_BN: Tensor  # int64, valid up to counts_B, as are the next two
    logprobs_BN: Tensor  # float32
    versions_BN: Tensor  # int32

    def __len__(self) -> int:
        return len(self.requests)

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device) -> Rows:
        """Nothing drawn yet."""
        batch, most_tokens = len(requests), max((r.sampling.max_new_tokens for r in requests), default=0)
        most_stops = max((len(r.sampling.stop_token_ids) for r in requests), default=0)
        stops = [list(r.sampling.stop_token_ids) for r in requests]

        def int64(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Rows(
            requests=list(requests),
            seeds_B=int64([r.seed for r in requests]),
            temperatures_B=torch.tensor([r.sampling.temperature for r in requests], dtype=torch.float32, device=device),
            limits_B=int64([r.sampling.max_new_tokens for r in requests]),
            stops_BK=int64([s + [NO_TOKEN] * (most_stops - len(s)) for s in stops]).view(batch, most_stops),
            counts_B=torch.zeros(batch, dtype=torch.int64, device=device),
            alive_B=torch.ones(batch, dtype=torch.bool, device=device),
            tokens_BN=torch.zeros(batch, most_tokens, dtype=torch.int64, device=device),
            logprobs_BN=torch.zeros(batch, most_tokens, device=device),
            versions_BN=torch.zeros(batch, most_tokens, dtype=torch.int32, device=device),
        )

    def select(self, rows: Tensor) -> Rows:
        """These rows only, int64 [B']."""
        return Rows(
            requests=[self.requests[row] for row in rows.tolist()],
            **{name: value[rows] for name, value in vars(self).items() if name != "requests"},
        )

    def join(self, other: Rows) -> Rows:
        """The rows of both, these first."""
        joined = {
            name: _concatenate(value, getattr(other, name), NO_TOKEN if name == "stops_BK" else 0)
            for name, value in vars(self).items()
            if name != "requests"
        }
        return Rows(requests=self.requests + other.requests, **joined)

    def append(self, tokens_B: Tensor, logprobs_B: Tensor, version: int) -> Tensor:
        """Take a drawn token for every living row. Returns int64, the rows that it finished."""
        rows = self.alive_B.nonzero()[:, 0]
        places = self.counts_B[rows]
        self.tokens_BN[rows, places] = tokens_B[rows]
        self.logprobs_BN[rows, places] = logprobs_B[rows]
        self.versions_BN[rows, places] = version
        self.counts_B[rows] += 1
        ended_B = self._stopped() | (self.counts_B == self.limits_B)
        finished = (ended_B & self.alive_B).nonzero()[:, 0]
        self.alive_B[finished] = False
        return finished

    def last_tokens(self) -> Tensor:
        """int64 [B], the token drawn last, of rows that have one."""
        return self.tokens_BN.gather(1, self.counts_B[:, None] - 1)[:, 0]

    def _stopped(self) -> Tensor:
        return (self.stops_BK == self.last_tokens()[:, None]).any(dim=1)

    def prefixes(self) -> list[tuple[int, ...]]:
        """Prompt and drawn tokens of each row."""
        drawn = zip(self.tokens_BN.tolist(), self.counts_B.tolist(), strict=True)
        return [r.prompt_ids + tuple(t[:n]) for r, (t, n) in zip(self.requests, drawn, strict=True)]

    def completions(self, rows: Tensor) -> list[Completion]:
        """Of finished rows, on the CPU. Each tensor owns its memory, so that it can be kept or shipped alone."""
        counts, stopped = self.counts_B[rows].tolist(), self._stopped()[rows].tolist()
        tokens, logprobs = self.tokens_BN[rows].cpu(), self.logprobs_BN[rows].cpu()
        versions = self.versions_BN[rows].cpu()
        return [
            Completion(
                request_id=self.requests[row].request_id,
                token_ids=tokens[i, : counts[i]].clone(),
                logprobs=logprobs[i, : counts[i]].clone(),
                weight_versions=versions[i, : counts[i]].clone(),
                finish_reason="stop" if stopped[i] else "length",
            )
            for i, row in enumerate(rows.tolist())
        ]


def _concatenate(first: Tensor, second: Tensor, fill: int) -> Tensor:
    """Along rows; the narrower is filled at the right."""
    if first.dim() == 2:
        width = max(first.shape[1], second.shape[1])
        first, second = (pad(t, (0, width - t.shape[1]), value=fill) for t in (first, second))
    return torch.cat([first, second])
