"""Rollouts from a generator, in step with training or ahead of it.

Groups are asked for in the order of the data, `lookahead` steps of them ahead of the step that is being trained:
0 is synchronous, 1 one-off, more n-off. What is asked for and not yet trained on is in the loop's state as numbers:
number and run say prompt and seeds, so that after a resume the very same requests are made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from grpo_recipes.data.sampler import SamplerState, next_indices, number_of, row_of
from grpo_recipes.engine.inbox import Inbox
from grpo_recipes.engine.rollout_source import RolloutBatch
from grpo_recipes.engine.rollouts import POLL_S, Rollout
from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import Completion, GeneratorStalled, Request, Sampling
from grpo_recipes.generation.seeds import sample_seed
from grpo_recipes.recipe.schema import DeadlineConfig, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_recipes.engine.parts import LoopState, Prompts

ATTEMPT = 1 << 32  # the seed of a sample's replacement is that of sample + attempt * ATTEMPT


@dataclass(frozen=True)
class Asked:
    """One request for a sample of a group."""

    sample: int
    attempt: int
    seed: int


@dataclass
class Group:
    """One prompt's samples, on their way."""

    number: int
    row: int  # of the training data
    asked_in: int  # step
    asked_at: float  # seconds, of the source's clock
    waiting: dict[int, Asked] = field(default_factory=dict)  # by request id
    done: dict[int, tuple[Completion, int]] = field(default_factory=dict)  # by sample: with its seed
    place: int = -1  # in the order of arrival, once nothing is waited for


@dataclass(frozen=True)
class Pace:
    """Steps. `lookahead`: groups are asked for so many steps before the one that takes them in order. `slack`: a group
    may be passed over so long by others that are ready. A rollout is at most lookahead + slack steps old."""

    lookahead: int
    slack: int
    in_flight_updates: bool  # new weights do not wait for what is being drawn

    @staticmethod
    def of(recipe: Recipe) -> Pace:
        assert recipe.grpo is not None
        async_grpo = recipe.grpo.async_grpo
        if not async_grpo.enabled:
            return Pace(0, 0, in_flight_updates=False)
        age = async_grpo.max_trajectory_age_steps
        slack = age // 2 if async_grpo.consumption == "ready_first" else 0
        return Pace(age - slack, slack, async_grpo.in_flight_weight_updates)


class DrawnRollouts:
    """The RolloutSource over a generator.

    Args:
        train: what prompts are drawn from.
        last_step: nothing is asked for beyond it.
        refit: brings the trainer's weights to the generator.
        check_stop: raises Interrupted where the named phase may be abandoned.
        order: the groups of each step (counted from 0) as another run took them; default: as they come.
        clock: seconds.
    """

    def __init__(
        self,
        recipe: Recipe,
        train: Prompts,
        inbox: Inbox,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        *,
        last_step: int,
        refit: Callable[[int], Any],
        check_stop: Callable[[str], None],
        order: Mapping[int, Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert recipe.grpo is not None
        self.grpo, self.shuffle, self.train, self.inbox = recipe.grpo, recipe.data.shuffle, train, inbox
        self.tokenizer, self.last_step, self._refit, self._check_stop = tokenizer, last_step, refit, check_stop
        generation = recipe.policy.generation
        self.sampling = Sampling(generation.temperature, generation.max_new_tokens, stop_token_ids)
        self.pace, self.order, self.clock = Pace.of(recipe), order, clock
        self._groups: dict[int, Group] = {}  # asked for and not taken, by number
        self._group_of: dict[int, Group] = {}  # by id of an unfinished request
        self._before: float | None = None  # when the last batch was complete
        self._next_id = self._complete = self._dropped = self._replaced = 0

    # -- the RolloutSource contract --------------------------------------------------------------------------------
    def next(self, state: LoopState) -> RolloutBatch:
        began = self.clock()
        sampler = self._ask_ahead(state)
        groups = self._wait_for(lambda: self._chosen(state.step))
        for group in groups:
            del self._groups[group.number]
        now, before = self.clock(), self._before
        self._before = now
        ahead = self.pace.lookahead > 0
        batch = RolloutBatch(
            groups=tuple(group.number for group in groups),
            rollouts=self._rollouts(groups),
            sampler=sampler,
            pending=tuple(sorted(self._groups)),
            arrived=tuple(g.number for g in sorted(groups, key=lambda g: g.place)) if ahead else (),
            metrics=self._metrics(groups, state.step),
            timing={"rollout_wait": now - began} if ahead else {},
            seconds=now - (began if before is None else before) if ahead else None,
        )
        self._dropped = self._replaced = 0
        return batch

    def refit(self, version: int) -> Any:
        if self._group_of and not self.pace.in_flight_updates:
            self._wait_for(lambda: list(self._groups.values()))
        if not self._group_of:
            return self._refit(version)
        self.inbox.generator.pause()
        stats = self._refit(version)
        self.inbox.generator.resume(version)
        return stats

    # -- asking ----------------------------------------------------------------------------------------------------
    def _ask_ahead(self, state: LoopState) -> SamplerState:
        """Ask for what the state says is in flight and is not (after a resume), and for what the pace allows now."""
        size, first = len(self.train), number_of(state.sampler, len(self.train))
        upto = min(state.step + 1 + self.pace.lookahead, self.last_step) * self.grpo.num_prompts_per_step
        rows, sampler = next_indices(state.sampler, size, max(0, upto - first), self.shuffle)
        missing = [number for number in state.pending if number not in self._groups]
        now = self.clock()
        groups = [Group(n, row_of(n, state.sampler.seed, size, self.shuffle), state.step, now) for n in missing]
        groups += [Group(first + n, row, state.step, now) for n, row in enumerate(rows)]
        samples = range(self.grpo.num_generations_per_prompt)
        self.inbox.submit([self._request(group, sample, 0) for group in groups for sample in samples])
        self._groups |= {group.number: group for group in groups}
        return sampler

    def _request(self, group: Group, sample: int, attempt: int) -> Request:
        step, position = divmod(group.number, self.grpo.num_prompts_per_step)
        seed = sample_seed(self.grpo.seed, step, position, sample + attempt * ATTEMPT)
        request = Request(self._next_id, self.train.prompt_ids[group.row], seed, self.sampling)
        self._next_id += 1
        group.waiting[request.request_id] = Asked(sample, attempt, seed)
        self._group_of[request.request_id] = group
        return request

    # -- waiting ---------------------------------------------------------------------------------------------------
    def _chosen(self, step: int) -> list[Group]:
        """The groups that the step takes if they are complete: those that may not grow older, then what is ready, then
        the oldest."""
        count = self.grpo.num_prompts_per_step
        numbers = sorted(self._groups)
        if self.order is not None:
            if step not in self.order or not set(self.order[step]) <= self._groups.keys():
                raise UserError(
                    f"the groups that were trained on in step {step + 1} are not on record, or not asked for here",
                    where="--replay",
                    mend="replay a run of the same recipe that came so far",
                )
            return [self._groups[number] for number in sorted(self.order[step])]
        due = [n for n in numbers if n < (step - self.pace.slack + 1) * count]
        ready = sorted((n for n in numbers if not self._groups[n].waiting), key=lambda n: self._groups[n].place)
        chosen = list(dict.fromkeys([*due, *ready, *numbers]))[:count]
        return [self._groups[number] for number in sorted(chosen)]

    def _wait_for(self, wanted: Callable[[], list[Group]]) -> list[Group]:
        """Until what is wanted is complete; past the deadline it is made so."""
        deadline = self.grpo.rollout_deadline
        expires = None if deadline.seconds is None else self.clock() + deadline.seconds
        heard = self.clock()
        while True:
            groups = wanted()
            late = [group for group in groups if group.waiting]
            if not late:
                return groups
            self._check_stop("generation")
            now = self.clock()
            if expires is not None and now >= expires:
                self._give_up(late, deadline)
                expires, heard = now + (deadline.seconds or 0.0), now
            elif self._receive(POLL_S if expires is None else min(POLL_S, expires - now)):
                heard = self.clock()
            elif now - heard >= self.grpo.rollout_watchdog_s:
                raise GeneratorStalled(self._missing(late, now, now - heard))

    def _receive(self, seconds: float) -> bool:
        """Whether anything came."""
        found = self.inbox.take(self._group_of.keys(), seconds)
        for completion in found:
            group = self._group_of.pop(completion.request_id)
            asked = group.waiting.pop(completion.request_id)
            self._settle(group, asked, completion)
        return bool(found)

    def _settle(self, group: Group, asked: Asked, completion: Completion) -> None:
        group.done[asked.sample] = completion, asked.seed
        if not group.waiting:
            group.place, self._complete = self._complete, self._complete + 1

    def _give_up(self, late: Sequence[Group], deadline: DeadlineConfig) -> None:
        """The deadline is over: ask anew with other seeds, or leave the samples out."""
        self.inbox.abort([request_id for group in late for request_id in group.waiting])
        requests = []
        for group in late:
            expired, group.waiting = group.waiting, {}
            for request_id in expired:
                del self._group_of[request_id]
            again = [a for a in expired.values() if a.attempt < deadline.max_replacements]
            requests += [self._request(group, asked.sample, asked.attempt + 1) for asked in again]
            self._replaced += len(again)
            for asked in expired.values():
                if asked.attempt >= deadline.max_replacements:
                    self._dropped += 1
                    self._settle(group, asked, nothing())
        self.inbox.submit(requests)

    def _missing(self, late: Sequence[Group], now: float, silence: float) -> str:
        told = [
            f"group {g.number} (row {g.row}): samples {', '.join(str(a.sample) for a in g.waiting.values())} "
            f"(requests {', '.join(map(str, g.waiting))}), asked for {now - g.asked_at:.0f} s ago"
            for g in late
        ]
        more = [f"and {len(told) - 8} more groups"] if len(told) > 8 else []
        return (
            f"no rollout has come from the generator for {silence:.0f} s (grpo.rollout_watchdog_s); missing: "
            + "; ".join([*told[:8], *more])
        )

    # -- giving ----------------------------------------------------------------------------------------------------
    def _rollouts(self, groups: Sequence[Group]) -> list[Rollout]:
        samples = range(self.grpo.num_generations_per_prompt)
        drawn = [(group, *group.done[sample]) for group in groups for sample in samples]
        texts = self.tokenizer.batch_decode([c.token_ids for _, c, _ in drawn], skip_special_tokens=True)
        return [
            Rollout(self.train.examples[group.row], self.train.prompt_ids[group.row], completion, text, seed)
            for (group, completion, seed), text in zip(drawn, texts, strict=True)
        ]

    def _metrics(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self.grpo.rollout_deadline.seconds is not None:
            metrics |= {
                "train/rollouts_dropped": float(self._dropped),
                "train/rollouts_replaced": float(self._replaced),
            }
        if self.pace.lookahead:
            ages = [step - group.asked_in for group in groups]
            metrics |= {
                "train/trajectory_age_min": float(min(ages)),
                "train/trajectory_age_mean": sum(ages) / len(ages),
                "train/trajectory_age_max": float(max(ages)),
                "train/rollout_buffer_groups": float(sum(not group.waiting for group in self._groups.values())),
                "train/rollouts_in_flight": float(len(self._group_of)),
            }
        return metrics


def nothing() -> Completion:
    """Of a sample that was left out."""
    return Completion(-1, torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0, dtype=torch.int32), "abort")
