"""A Hugging Face folder from a checkpoint: on any machine, tensor by tensor, without Megatron and without a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.engine.checkpoint import POLICY, STATE, find_damage
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.model_folder import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpo_recipes.recipe.schema import PolicyConfig


def export_checkpoint(source: Path, target: Path, step: int | None = None) -> Path:
    """Write what the trainer's own export would have written at that step. Returns the checkpoint's folder.

    Args:
        source: a run's folder, or one checkpoint in it.
        step: which checkpoint of a run; by default the newest.

    Raises:
        UserError: no such checkpoint, or a damaged one; its run's recipe or model folder is gone; `target` is not
            empty; the disk is full.
    """
    from grpo_recipes.recipe.compose import load_resolved
    from grpo_recipes.recipe.model_folder import model_path

    if target.exists() and (not target.is_dir() or next(target.iterdir(), None) is not None):
        raise UserError("exists and is not an empty folder", where=str(target), mend="choose another folder")
    checkpoint = find_checkpoint(source, step)
    problem = find_damage(checkpoint)
    if problem:
        raise UserError(f"damaged: {problem}", where=str(checkpoint), mend="choose another checkpoint with --step")
    recipe_path = checkpoint.parent.parent / "recipe.yaml"
    if not recipe_path.is_file():
        raise UserError(
            "the checkpoint lies in no run folder, whose recipe.yaml names the model",
            where=str(checkpoint),
            mend="give a checkpoint inside its run: RUN/checkpoints/step_…",
        )
    policy = load_resolved(recipe_path).recipe.policy
    model = model_path(policy.model_name, policy.model_revision)

    from grpo_recipes.policy.hf.folder import export_model

    tensors, dtype = _saved_weights(checkpoint / POLICY, policy, model)
    with written_aside(target) as aside:
        export_model(aside, model, tensors, dtype, trained_from_source=policy.initial_weights == "pretrained")
    return checkpoint


def _saved_weights(folder: Path, policy: PolicyConfig, model: Path) -> tuple[Iterator[tuple[str, Tensor]], torch.dtype]:
    """Hugging Face names and whole tensors, and their dtype, by the trainer that wrote the checkpoint."""
    if policy.dtensor_cfg.enabled:
        from grpo_recipes.policy.dtensor.checkpoint import SavedWeights

        weights = SavedWeights(folder, read_json(model / "config.json"))
        return weights.exported(), weights.dtype
    import torch

    from grpo_recipes.policy.megatron.shards import SavedState

    saved = SavedState(folder)
    saved.check_weights()
    return saved.exported(), getattr(torch, saved.model.dtype)


def find_checkpoint(source: Path, step: int | None) -> Path:
    """Raises UserError if there is none, or none of that step."""
    if not source.is_dir():
        raise UserError("no such run", where=str(source), mend="`nemo-run runs` lists them; or give a folder")
    if (source / STATE).is_file():
        if step is not None and source.name != f"step_{step:06d}":
            raise UserError(f"is not the checkpoint of step {step}", where=str(source), mend="leave --step out")
        return source
    found = sorted((source / "checkpoints").glob("step_*"))
    if not found:
        raise UserError(
            "holds no checkpoint", where=str(source), mend="give the folder of a run, or of a checkpoint in it"
        )
    if step is None:
        return found[-1]
    wanted = source / "checkpoints" / f"step_{step:06d}"
    if wanted not in found:
        steps = ", ".join(str(int(path.name.removeprefix("step_"))) for path in found)
        raise UserError(f"has no checkpoint of step {step}", where=str(source), mend=f"there are: {steps}")
    return wanted


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` if all goes well; OSError becomes UserError."""
    target = target.resolve()
    aside = target.with_name(f".writing_{target.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if target.exists():
            target.rmdir()
        aside.rename(target)
    except OSError as error:
        raise UserError(f"could not be written: {error}", where=str(target), mend="free disk space") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
