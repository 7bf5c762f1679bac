"""mode.json: which part of a run this one is, and of what. An absent file means a whole run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import Recipe
from grpo_recipes.runs.files import read_json_object, write_atomically
from grpo_recipes.runs.folder import RunFolder, open_run

Kind = Literal["whole", "rollout-only", "train-only", "replay"]
KINDS = ("whole", "rollout-only", "train-only", "replay")


@dataclass(frozen=True)
class Mode:
    """rollout-only: rollouts are written, nothing is trained. train-only: those of the run `source` are trained on.
    replay: the groups of each step are those that `source` took, in an asynchronous run."""

    kind: Kind = "whole"
    source: str | None = None  # absolute path of a run folder

    def check(self, recipe: Recipe) -> None:
        """Raises UserError where the recipe has no such parts."""
        if self.kind == "whole":
            return
        if recipe.grpo is None:
            raise UserError(
                "only GRPO has rollouts, and this recipe trains on reference answers",
                where=f"--{self.kind}",
                mend="leave it out",
            )
        if self.kind == "replay" and not recipe.grpo.async_grpo.enabled:
            raise UserError(
                "without asynchrony the groups of a step are always the same",
                where="--replay",
                mend="leave it out, or give the overrides of the asynchronous run",
            )
        if self.source is not None:
            open_run(self.source)

    def options(self) -> list[str]:
        """Of `nemo-run recipe`."""
        return [] if self.kind == "whole" else [f"--{self.kind}", *([self.source] if self.source else [])]


WHOLE = Mode()


def write_mode(folder: RunFolder, mode: Mode) -> None:
    write_atomically(folder.mode_path, json.dumps(asdict(mode)) + "\n")


def read_mode(folder: RunFolder) -> Mode:
    """Raises UserError where the file is damaged."""
    if not folder.mode_path.exists():
        return Mode()
    content = read_json_object(folder.mode_path, mend="restore the file")
    if set(content) != {"kind", "source"} or content["kind"] not in KINDS:
        raise UserError("is not a mode of a run", where=str(folder.mode_path), mend="restore the file")
    return Mode(**content)
