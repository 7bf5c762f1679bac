"""Rollouts that another run has drawn, judged and stored: nothing is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_recipes.data.sampler import next_indices
from grpo_recipes.engine.rollout_source import RolloutBatch
from grpo_recipes.engine.rollouts import Rollout
from grpo_recipes.environments.contract import StepResult
from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import Completion
from grpo_recipes.recipe.schema import Recipe
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.rollout_store import FINISH_REASONS, read_stored, stored_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_recipes.engine.parts import LoopState, Prompts


class ReplayedRollouts:
    """The RolloutSource over the files of a run (runs/rollout_store.py), which hold judgements, too.

    Raises:
        UserError: the folder lacks one of the steps up to `last_step`.
    """

    def __init__(
        self, recipe: Recipe, train: Prompts, source: RunFolder, tokenizer: PreTrainedTokenizerBase, *, last_step: int
    ) -> None:
        assert recipe.grpo is not None
        self.grpo, self.shuffle, self.train = recipe.grpo, recipe.data.shuffle, train
        self.source, self.tokenizer = source, tokenizer
        missing = sorted(set(range(1, last_step + 1)) - set(stored_steps(source)))
        if missing:
            raise UserError(
                f"holds no rollouts of step {missing[0]}, and this run trains on steps 1 to {last_step}",
                where=str(source.path),
                mend="set grpo.max_num_steps to the steps that are there; logger.num_rollout_steps_to_store says how "
                "many a run keeps, and --rollout-only keeps all",
            )

    def next(self, state: LoopState) -> RolloutBatch:
        """Raises UserError where a file is damaged, or is not of this recipe's data."""
        found = read_stored(self.source, state.step + 1)
        per_prompt, count = self.grpo.num_generations_per_prompt, self.grpo.num_prompts_per_step
        if len(found.sample) != count * per_prompt:
            raise UserError(
                f"step {found.step} has {len(found.sample)} rollouts, this recipe {count} x {per_prompt}",
                where=str(self.source.path),
                mend="give a run of this recipe",
            )
        tokens = torch.from_numpy(found.response_ids).long().split(found.response_lengths.tolist())
        logprobs = torch.from_numpy(found.logprobs).split(found.response_lengths.tolist())
        versions = torch.from_numpy(found.weight_versions).split(found.response_lengths.tolist())
        texts = self.tokenizer.batch_decode(list(tokens), skip_special_tokens=True)
        rollouts = []
        for n, row in enumerate(found.example.tolist()):
            reason = FINISH_REASONS[found.finish_reason[n]]
            completion = Completion(n, tokens[n], logprobs[n], versions[n], reason)  # type: ignore[arg-type]
            rollouts.append(
                Rollout(self.train.examples[row], self.train.prompt_ids[row], completion, texts[n], int(found.seed[n]))
            )
        judged = [
            bool(valid) or r.completion.finish_reason == "abort" for valid, r in zip(found.valid, rollouts, strict=True)
        ]
        _, sampler = next_indices(state.sampler, len(self.train), count, self.shuffle)
        return RolloutBatch(
            groups=tuple(found.group[::per_prompt].tolist()),
            rollouts=rollouts,
            sampler=sampler,
            result=StepResult(
                [float(reward) if valid else None for reward, valid in zip(found.reward, found.valid, strict=True)],
                [None] * len(rollouts),
                [None if ok else "its grader failed when it was drawn" for ok in judged],
                [{} for _ in rollouts],
            ),
        )

    def refit(self, version: int) -> None:
        """Nothing draws."""
