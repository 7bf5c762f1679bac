"""A whole run in a run folder: set up, write the manifest, resume if there is something to resume, loop, export."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_recipes.data.sampler import SamplerState
from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.interrupt import StopRequest
from grpo_recipes.engine.loop import Reporter, run_loop, state_from_json
from grpo_recipes.engine.parts import LoopState, Parts
from grpo_recipes.engine.setup import open_parts
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import ResolvedRecipe
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.manifest import add_attempt, build_manifest, read_manifest, write_manifest
from grpo_recipes.runs.metrics import MetricsLog, read_metrics
from grpo_recipes.runs.mode import Mode, read_mode
from grpo_recipes.runs.progress import Progress
from grpo_recipes.runs.sinks import SINKS, open_sinks


def run(resolved: ResolvedRecipe, folder: RunFolder, attempt: int, stop: StopRequest, reporter: Reporter) -> None:
    """Run the recipe to its end; an attempt after the first goes on from the newest undamaged checkpoint.

    Raises:
        Interrupted: a stop was asked for; the run can go on from its checkpoint.
        UserError: something that the user can mend.
    """
    recipe = resolved.recipe
    reporter.phase("setup")
    sinks = [name for name in SINKS if getattr(recipe.logger, name)]
    reporter.sinks = open_sinks(folder, sinks, recipe.logger.project, recipe.model_dump(mode="json"))
    mode = read_mode(folder)
    reporter.recipe_digest = resolved.digest
    reporter.stored_steps = None if mode.kind == "rollout-only" else recipe.logger.num_rollout_steps_to_store
    store = CheckpointStore(
        folder.checkpoints_dir,
        keep_last=recipe.checkpointing.keep_last,
        keep_top_k=recipe.checkpointing.keep_top_k,
        higher_is_better=recipe.checkpointing.higher_is_better,
    )
    with open_parts(recipe, stop.check, mode, resolved.name) as (parts, last, inputs):
        state = LoopState(0, SamplerState(recipe.plan.seed), 0, 0)
        checkpoint = store.latest(warn) if attempt > 1 else None
        if checkpoint is not None:
            parts.policy.load(checkpoint.policy_folder)
            state = state_from_json(checkpoint.state)
            parts.refit(state.weight_version)
            print(f"resumed from step {state.step}", flush=True)
        elif attempt > 1:
            print("no checkpoint yet: starting again from step 0", flush=True)
        record_manifest(resolved, folder, attempt, state.step, parts, inputs, mode)
        evaluated = {row.step for row in read_metrics(folder.metrics_path) if row.kind == "val"}
        reporter.log = MetricsLog(folder, attempt, None if attempt == 1 else state.step)
        reporter.update(step=state.step, max_steps=last)
        run_loop(parts, state, last, {step for step in evaluated if step <= state.step}, store, reporter, stop, mode)
        if mode.kind != "rollout-only":  # else the model is the one that it began with
            reporter.phase("export")
            export(parts, folder.path / "model")


def export(parts: Parts, target: Path) -> None:
    """The trained model as Hugging Face transformers reads it, written aside and renamed."""
    import shutil

    aside = target.with_name(f".writing_{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    parts.policy.export(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def record_manifest(
    resolved: ResolvedRecipe,
    folder: RunFolder,
    attempt: int,
    step: int,
    parts: Parts,
    inputs: dict[str, Any],
    mode: Mode,
) -> None:
    """Write it at the first attempt; at a later one check that the inputs are the same and add the attempt.

    Raises:
        UserError: model, tokenizer or data have changed since the run began.
    """
    if attempt > 1 and folder.manifest_path.exists():
        manifest = read_manifest(folder)
        changed = [name for name, digest in inputs.items() if manifest["inputs"].get(name) != digest]
        if changed:
            raise UserError(
                f"changed since the run began: {', '.join(changed)}",
                where=str(folder.manifest_path),
                mend="bring the inputs back as they were, or start a new run",
            )
        write_manifest(folder, add_attempt(manifest, attempt, step))
        return
    manifest = build_manifest(
        name=resolved.name,
        version=resolved.version,
        digest=resolved.digest,
        explicit=resolved.values,
        full=resolved.recipe.model_dump(mode="json"),
        overrides=resolved.overrides,
        command=["nemo-run", "recipe", f"{resolved.name}@{resolved.version}", *resolved.overrides, *mode.options()],
        mode=asdict(mode),
        seeds={"run": resolved.recipe.plan.seed, "initial_weights": resolved.recipe.policy.init_seed},
        inputs=inputs,
        backends={
            **parts.policy.describe(),
            "generation": "none" if mode.kind == "train-only" else resolved.recipe.policy.generation.backend,
        },
        gpus=parts.policy.gpus(),
    )
    write_manifest(folder, manifest)


def first_progress(attempt: int) -> Progress:
    now = time.time()
    return Progress(
        attempt=attempt,
        step=0,
        max_steps=0,
        phase="setup",
        reward=None,
        accuracy=None,
        tokens_per_second=None,
        started_at=now,
        updated_at=now,
        status="running",
    )


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
