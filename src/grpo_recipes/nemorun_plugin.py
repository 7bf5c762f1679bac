"""`nemorun recipe …`: NeMo-Run's own command has ours too (entry-point group nemo_run.cli)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import typer
from nemo_run.cli.api import Entrypoint, entrypoint

from grpo_recipes import cli
from grpo_recipes.errors import UserError


class _Command(Entrypoint):
    """An entrypoint that is a typer command as it stands, not a function whose arguments NeMo-Run parses."""

    @property
    def path(self) -> str:
        return "recipe"  # `nemorun recipe`, not `nemorun recipe recipe`

    def cli(self, parent: typer.Typer) -> None:
        # NeMo-Run has put an empty group of that name there, which would win.
        parent.registered_groups = [group for group in parent.registered_groups if group.name != "recipe"]
        parent.command("recipe")(self.fn)


# type: of "task", the default, NeMo-Run claims the argument `executor` for itself.
@entrypoint(namespace="recipe", entrypoint_cls=_Command, type="experiment")
@functools.wraps(cli.recipe)
def recipe(*args: Any, **kwargs: Any) -> None:
    try:
        cli.recipe(*args, **kwargs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
