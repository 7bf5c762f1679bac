"""The run: evaluate, checkpoint, step, until done. The same for GRPO and for supervised warm starts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_recipes.data.sampler import SamplerState
from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.evaluate import evaluate
from grpo_recipes.engine.interrupt import Interrupted, StopRequest
from grpo_recipes.engine.mismatch import BatchRefused
from grpo_recipes.engine.parts import LoopState, Parts, StepOutcome
from grpo_recipes.engine.phases import Phases
from grpo_recipes.engine.rollout_step import rollout_step
from grpo_recipes.engine.saver import Saver
from grpo_recipes.engine.sft import sft_step
from grpo_recipes.engine.step import grpo_step
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import GRPOConfig, SFTConfig
from grpo_recipes.runs.arrivals import add_arrival
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import Kind, MetricsLog
from grpo_recipes.runs.mode import WHOLE, Mode
from grpo_recipes.runs.progress import Progress, Status, write_progress
from grpo_recipes.runs.rollout_store import keep_last, write_stored
from grpo_recipes.runs.rollouts import write_rollouts
from grpo_recipes.runs.sinks import Sink

Step = Callable[[Parts, LoopState, Phases], StepOutcome]


@dataclass
class Reporter:
    """Everything the run says: metrics.jsonl, sinks and progress.json."""

    folder: RunFolder
    progress: Progress
    log: MetricsLog | None = None  # opened when it is known where the attempt starts
    sinks: Sequence[Sink] = ()
    recipe_digest: str = ""
    stored_steps: int | None = 0  # last steps of which all rollouts are kept; None: every step

    def phase(self, name: str) -> None:
        self.update(phase=name)

    def update(self, **changes: Any) -> None:
        self.progress = replace(self.progress, updated_at=time.time(), **changes)
        write_progress(self.folder, self.progress)

    def record(
        self, step: int, kind: Kind, metrics: dict[str, float], timing: dict[str, float], memory: dict[str, int]
    ) -> None:
        assert self.log is not None
        self.log.append(step, kind, metrics, timing, memory)
        for sink in self.sinks:
            sink.log(step, {**metrics, **{f"timing/{kind}/{name}": value for name, value in timing.items()}, **memory})

    def keep(self, outcome: StepOutcome) -> None:
        """The rollouts of a step."""
        step = outcome.state.step
        if outcome.records:
            write_rollouts(self.folder, step, outcome.records)
        if outcome.stored is not None and self.stored_steps != 0:
            write_stored(self.folder, step, replace(outcome.stored, recipe_digest=self.recipe_digest))
            if self.stored_steps is not None:
                keep_last(self.folder, self.stored_steps)
        if outcome.arrival is not None:
            add_arrival(self.folder, self.progress.attempt, step, *outcome.arrival)

    def close(self, status: Status, message: str) -> None:
        for sink in self.sinks:
            sink.close()
        if self.log:
            self.log.close()
        self.update(status=status, message=message)


def run_loop(
    parts: Parts,
    state: LoopState,
    last_step: int,
    evaluated: set[int],
    store: CheckpointStore,
    reporter: Reporter,
    stop: StopRequest,
    mode: Mode = WHOLE,
) -> LoopState:
    """From `state` to `last_step`.

    Args:
        evaluated: steps whose evaluation is already on record.

    Raises:
        Interrupted: a stop was asked for; the state of the last completed step is checkpointed.
        UserError: too many steps in a row were not finite, or a checkpoint could not be written.
    """
    recipe = parts.recipe
    plan = recipe.plan
    half = mode.kind in ("rollout-only", "train-only")  # without changing weights, or without a generator
    step: Step = rollout_step if mode.kind == "rollout-only" else grpo_step if recipe.grpo else sft_step
    greedy = recipe.grpo is not None and recipe.grpo.val_greedy
    saved = state.step if state.step else -1
    metric: float | None = None
    save_seconds = 0.0
    saver = Saver(store, parts.policy, background=recipe.checkpointing.async_save)

    def save() -> None:
        nonlocal saved, save_seconds
        if recipe.checkpointing.enabled and saved != state.step:
            reporter.phase("checkpoint")
            start = time.perf_counter()
            saver.save(state.step, state_to_json(state), metric)
            saved, save_seconds = state.step, time.perf_counter() - start

    def enter(phase: str) -> None:
        saver.poll()
        stop.check(phase)
        reporter.phase(phase)

    while True:
        try:
            stop.check("evaluation")
            if not half and evaluation_due(plan, state.step, last_step) and state.step not in evaluated:
                phases = Phases(enter, parts.policy.peak_memory)
                with phases("evaluation"):
                    values = evaluate(
                        parts, state.step, problems=plan.max_val_samples, run_seed=plan.seed, greedy=greedy
                    )
                metric = values.get(recipe.checkpointing.metric_name)
                saved = -1  # a stop before this evaluation has left a checkpoint that does not know the metric
                reporter.record(state.step, "val", values, phases.seconds, phases.peak_bytes)
                reporter.update(accuracy=values.get("val/accuracy"))
                print(f"step {state.step}: {brief(values)}", flush=True)
            if state.step and (state.step % recipe.checkpointing.save_period == 0 or state.step == last_step):
                save()
            if state.step == last_step:
                saver.finish()
                return state
            phases = Phases(enter, parts.policy.peak_memory)
            start = time.perf_counter()
            outcome = step(parts, state, phases)
        except (Interrupted, BatchRefused) as stopped:
            if isinstance(stopped, BatchRefused) and stopped.outcome is not None:
                reporter.keep(stopped.outcome)  # to be looked into, with the weights before it
            save()
            saver.finish()
            raise
        except UserError:
            saver.finish()  # what was begun is whole on disk before the run ends
            raise
        state, metric = outcome.state, None
        seconds = time.perf_counter() - start
        timing = {**phases.seconds, "total": seconds, "checkpoint": save_seconds, **outcome.throughput}
        save_seconds = 0.0
        reporter.keep(outcome)
        reporter.record(state.step, "train", outcome.metrics, timing, phases.peak_bytes)
        reporter.update(
            step=state.step,
            reward=outcome.metrics.get("train/reward"),
            tokens_per_second=outcome.tokens / seconds,
        )
        print(f"step {state.step}: {brief(outcome.metrics)} ({seconds:.2f} s)", flush=True)
        if state.bad_steps > plan.max_bad_steps:
            saver.finish()
            raise UserError(
                f"{state.bad_steps} optimizer steps in a row, the last in step {state.step}, had a loss or gradient "
                "that is not finite, or no response that the grader could judge; nothing was updated",
                where=f"{'grpo' if recipe.grpo else 'sft'}.max_bad_steps",
                mend="look at the rollouts of these steps: mend the grader, or start a new run with a lower learning rate",
            )


def evaluation_due(plan: GRPOConfig | SFTConfig, step: int, last_step: int) -> bool:
    if step == 0:
        return plan.val_at_start
    return (plan.val_period > 0 and step % plan.val_period == 0) or (plan.val_at_end and step == last_step)


def brief(metrics: dict[str, float]) -> str:
    shown = ("train/reward", "train/loss", "train/grad_norm", "val/accuracy", "val/greedy_accuracy")
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)


def state_to_json(state: LoopState) -> dict[str, object]:
    return dataclasses.asdict(state)


def state_from_json(content: dict) -> LoopState:
    pending = tuple(content.get("pending", ()))  # absent from checkpoints of earlier versions, where nothing was
    return LoopState(**{**content, "sampler": SamplerState(**content["sampler"]), "pending": pending})
