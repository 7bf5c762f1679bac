"""Where recipes, executor profiles and measured results lie: in a source checkout, and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from grpo_recipes.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent.parent


def recipes_folder() -> Path:
    """A wheel carries recipes/ inside the package as _recipes; a checkout has it at its root.

    Raises:
        UserError: neither exists.
    """
    return _folder("recipes")


def launchers_folder() -> Path:
    """As `recipes_folder`, for executor profiles."""
    return _folder("launchers")


def measured_folder() -> Path | None:
    """Results of runs, <recipe>/<hardware>/<run>/: _measured in a wheel, results/measured in a checkout, or none."""
    for folder in (PACKAGE / "_measured", CHECKOUT / "results" / "measured"):
        if folder.is_dir():
            return folder
    return None


def _folder(name: str) -> Path:
    for folder in (PACKAGE / f"_{name}", CHECKOUT / name):
        if folder.is_dir():
            return folder
    raise UserError(
        f"the folder {name}/ was not found",
        where=str(PACKAGE),
        mend="install the grpo-recipes wheel again, or run from a complete checkout",
    )
