"""The weights of a run by their version: the initial ones, and those of its checkpoints, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from grpo_recipes.engine.checkpoint import read_checkpoint
from grpo_recipes.engine.export import export_checkpoint
from grpo_recipes.errors import UserError
from grpo_recipes.proof.diagnose_recompute import trainer_of
from grpo_recipes.recipe.model_folder import model_path
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.runs.folder import RunFolder

NEIGHBOURS = 2  # older versions that are tried, and newer ones


class Versions:
    """Args: scratch: an empty folder for what has to be written."""

    def __init__(self, run: RunFolder, policy: PolicyConfig, scratch: Path) -> None:
        self.policy, self.scratch = policy, scratch
        paths = sorted(run.checkpoints_dir.glob("step_*"))
        self.checkpoints = {int(read_checkpoint(path).state["weight_version"]): path for path in paths}

    @property
    def known(self) -> list[int]:
        return sorted({0, *self.checkpoints})

    def neighbours(self, version: int) -> list[int]:
        """The nearest first."""
        older = [v for v in self.known if v < version][-NEIGHBOURS:]
        newer = [v for v in self.known if v > version][:NEIGHBOURS]
        return sorted((*older, *newer), key=lambda v: (abs(v - version), v))

    def name(self, version: int) -> str:
        return f"{self.checkpoints[version].name}" if version in self.checkpoints else "initial weights"

    def folder(self, version: int) -> Path:
        """Raises UserError: no checkpoint holds that version, or it is damaged."""
        if version not in self.known:
            held = ", ".join(f"{v} ({self.name(v)})" for v in self.known)
            raise UserError(
                f"no checkpoint holds the weights of version {version}, by which these rollouts were judged",
                where=str(self.scratch) if not self.checkpoints else str(next(iter(self.checkpoints.values())).parent),
                mend=f"versions that there are: {held}; diagnose a step that follows one of them, or set "
                "checkpointing.save_period to 1 in a run that is to be diagnosed at any step",
            )
        written = self.scratch / f"version_{version}"
        source = model_path(self.policy.model_name, self.policy.model_revision)
        checkpoint = self.checkpoints.get(version)
        if checkpoint is None and self.policy.initial_weights == "pretrained":
            return source
        if written.exists():
            return written
        if checkpoint is not None:
            export_checkpoint(checkpoint, written)
            return written
        with trainer_of(self.policy, source) as trainer:
            trainer.export(written)
        return written
