"""Executor profiles: where a run is started and how. A YAML file each, in launchers/ or a site's own folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.locate import launchers_folder
from grpo_recipes.recipe.problems import Problem, nearest, raise_problems
from grpo_recipes.recipe.yaml_files import load_mapping


class Profile(BaseModel):
    """What launchers/local.yaml holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    executor: Literal["local"]
    description: str = ""
    env: dict[str, str] = Field(default_factory=dict)  # variables of the job, on top of those of the shell


def nemorun_home() -> Path:
    """NeMo-Run's own rule."""
    return Path(os.environ.get("NEMORUN_HOME") or Path.home() / ".nemo_run").expanduser()


def load_profile(reference: str) -> Profile:
    """The profile called `reference` in $NEMORUN_HOME/launchers, else in launchers/; or the file at that path.

    Raises:
        UserError: no such profile (names the nearest), not YAML, or a key or value that has no place there.
    """
    path = _find(reference)
    try:
        return Profile.model_validate(load_mapping(path))
    except ValidationError as error:
        raise_problems([_problem(path, details["loc"], details["msg"]) for details in error.errors()], str(path))
        raise


def _find(reference: str) -> Path:
    if reference.endswith((".yaml", ".yml")):
        if not Path(reference).is_file():
            raise UserError("no such profile", where=reference, mend="check the path given to --executor")
        return Path(reference)
    folders = [nemorun_home() / "launchers", launchers_folder()]
    names = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if reference in names:
        return names[reference]
    close = nearest(reference, names) or sorted(names)
    raise UserError(
        f"no executor profile is called {reference!r}",
        where="--executor",
        mend=f"choose {' or '.join(close)}, give the path of a YAML file, or put one into {folders[0]}",
    )


def _problem(path: Path, keys: tuple[int | str, ...], message: str) -> Problem:
    close = nearest(str(keys[0]), Profile.model_fields)
    mend = f"did you mean {close[0]}?" if close and close[0] != keys[0] else f"keys: {', '.join(Profile.model_fields)}"
    return Problem(f"{path}: {'.'.join(str(key) for key in keys)}", message, mend)
