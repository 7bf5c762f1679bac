"""Whether the rollouts of one run may be trained on by another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.leaves import leaves
from grpo_recipes.runs.folder import RunFolder, open_run
from grpo_recipes.runs.manifest import read_manifest

# What decides which rollouts a recipe draws and how they are judged. Everything else (layout, loss, optimizer, engine)
# may differ between the two.
SAME = (
    "data",
    "env",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.seed",
    "policy.generation.temperature",
    "policy.generation.max_new_tokens",
    "policy.generation.stop_token_ids",
)
INPUTS = ("model", "tokenizer", "chat_template", "train_rows")


def check_source(path: str, name: str, full: Mapping[str, Any], inputs: Mapping[str, Any]) -> RunFolder:
    """The run at `path`, whose rollouts a run of recipe `name` with all values `full` and these inputs trains on.

    Raises:
        UserError: it is no run, or one of another recipe, model, tokenizer, or data; with all that differs.
    """
    folder = open_run(path)
    manifest = read_manifest(folder)
    differences = [] if manifest["recipe"]["name"] == name else [f"recipe {manifest['recipe']['name']} (here {name})"]
    ours, theirs = dict(leaves(full)), dict(leaves(manifest["recipe"]["full"]))
    differences += [
        f"{key} {theirs.get(key)!r} (here {ours.get(key)!r})"
        for key in sorted(ours.keys() | theirs.keys())
        if key.startswith(tuple(f"{same}." for same in SAME)) or key in SAME
        if ours.get(key) != theirs.get(key)
    ]
    differences += [name for name in INPUTS if manifest["inputs"].get(name) != inputs[name]]
    if differences:
        raise UserError(
            f"its rollouts are not of this recipe; it has another {', another '.join(differences[:5])}",
            where=path,
            mend="train on the rollouts of a run with the same values of these, or draw new ones with --rollout-only",
        )
    return folder
