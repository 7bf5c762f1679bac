"""The command `nemo-run`. Thin: each command calls one room, which is imported when the command runs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

# Collecting garbage while modules are loaded takes a tenth of a short command's time; `recipe` turns it on again.
gc.disable()

import typer  # noqa: E402

from grpo_recipes import __version__  # noqa: E402
from grpo_recipes.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from grpo_recipes.recipe.compose import ResolvedRecipe
    from grpo_recipes.runs.mode import Mode

# pydantic looks for plugins in every installed distribution, which takes a tenth of the time of `show`.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

RUNS = Path("runs")

app = typer.Typer(
    name="nemo-run",
    help="Versioned GRPO post-training recipes: show them, run them, prove them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Make a Hugging Face model folder of something else.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
certify_app = typer.Typer(help="Show that something which must not change the result does not.", no_args_is_help=True)
app.add_typer(certify_app, name="certify")


def _recipe_names(incomplete: str) -> list[str]:
    from grpo_recipes.recipe.catalogue import catalogue

    names = [name for name, files in catalogue().items() for name in (name, *(f"{name}@{f.version}" for f in files))]
    return [name for name in names if name.startswith(incomplete)]


def _executor_names(incomplete: str) -> list[str]:
    from grpo_recipes.recipe.locate import launchers_folder

    return [path.stem for path in sorted(launchers_folder().glob("*.yaml")) if path.stem.startswith(incomplete)]


def _override_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    from grpo_recipes.recipe.schema_tree import all_keys

    return [f"{key}=" for key in all_keys() if key.startswith(incomplete)]


def _run_names(incomplete: str) -> list[str]:
    names = [path.name for path in RUNS.glob("*/")] if RUNS.is_dir() else []
    return [name for name in sorted(names) if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="NAME[@vN]", help="A recipe, or the path of a YAML file.", autocompletion=_recipe_names)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Dotted overrides, e.g. grpo.seed=7", autocompletion=_override_keys),
]
Run = Annotated[str, typer.Argument(help="A run's name in runs/, or its folder.", autocompletion=_run_names)]


@app.command()
def recipe(
    name: Name,
    overrides: Overrides = None,
    executor: Annotated[
        str,
        typer.Option(help="Executor profile: a name in launchers/, or a YAML file.", autocompletion=_executor_names),
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would run, stop.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/<recipe>-<time>.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this run.", autocompletion=_run_names)
    ] = None,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Write every step's rollouts; take no optimizer step.")
    ] = False,
    train_only: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Train on the rollouts of this run; draw none.", autocompletion=_run_names),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Take the groups of each step as this asynchronous run did.",
            autocompletion=_run_names,
        ),
    ] = None,
) -> None:
    """Run a recipe."""
    gc.enable()
    mode = _mode(rollout_only, train_only, replay, resume)
    if resume is not None:
        resolved, folder = _resumed(name, overrides or [], run_dir, resume)
    else:
        from grpo_recipes.recipe.compose import resolve

        resolved = resolve(name, overrides or [])
        folder = run_dir or _new_run_dir(resolved.name)
        mode.check(resolved.recipe)
    if executor == "local":
        from grpo_recipes.recipe.model_folder import check_model

        check_model(resolved.recipe.policy)
    from grpo_recipes.launch.run import launch

    raise typer.Exit(launch(resolved, folder, executor=executor, resume=resume is not None, dry_run=dry_run, mode=mode))


@app.command()
def recipes() -> None:
    """List the recipes: what each needs, and what was measured with it."""
    from grpo_recipes.recipe.catalogue import catalogue
    from grpo_recipes.recipe.listing import entry

    rows = [("recipe", "version", "model", "data", "devices", "evidence")]
    for files in catalogue().values():
        for file in files:
            line = entry(file)
            rows.append((file.name, file.version, line.model, line.data, line.devices, line.evidence))
    _print_table(rows)


@app.command()
def show(
    name: Name,
    overrides: Overrides = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print only the digest.")] = False,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print a YAML file that can be run as a recipe.")] = False,
) -> None:
    """Show a resolved recipe and where each value came from."""
    from grpo_recipes.recipe.compose import resolve

    resolved = resolve(name, overrides or [])
    if digest:
        typer.echo(resolved.digest)
    elif yaml:
        from grpo_recipes.recipe.yaml_files import dump

        typer.echo(dump(resolved.recipe.model_dump(mode="json")), nl=False)
    else:
        typer.echo(f"# {resolved.name} {resolved.version}, digest {resolved.digest}")
        typer.echo("\n".join(_shown(resolved)))


@app.command()
def runs(
    folder: Annotated[Path, typer.Option("--dir", help="The folder that holds the runs.")] = RUNS,
) -> None:
    """List runs, newest first."""
    from grpo_recipes.runs.folder import list_runs

    found = list_runs(folder)
    if not found:
        typer.echo(f"no runs in {folder}")
        return
    rows = [("run", "recipe", "status", "step", "reward", "accuracy", "started")]
    for run in found:
        of_steps = "" if run.max_steps is None else f"/{run.max_steps}"
        rows.append(
            (
                run.name,
                "-" if run.recipe is None else f"{run.recipe}@{run.version}" if run.version else run.recipe,
                run.status,
                "-" if run.step is None else f"{run.step}{of_steps}",
                _decimal(run.reward),
                _decimal(run.accuracy),
                "-" if run.started is None else f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}",
            )
        )
    _print_table(rows)


@app.command()
def report(run: Run) -> None:
    """Write a run's report.html, which opens without a network."""
    from grpo_recipes.proof.report import write_report

    typer.echo(write_report(_run_path(run)))


@app.command()
def diagnose(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="Default: the last whose rollouts are stored.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="At most so many responses of it.")] = 64,
) -> None:
    """Say where the difference between sampler and trainer comes from, on stored rollouts."""
    gc.enable()
    from grpo_recipes.proof.diagnose import diagnose as diagnose_run

    for line in diagnose_run(_run_path(run), step, samples=samples).lines():
        typer.echo(line)


@app.command()
def verify(
    run: Run,
    against: Annotated[Path | None, typer.Option(help="Reference band; default: the recipe's own.")] = None,
) -> None:
    """Say whether a run reproduced its recipe's reference: 0 it did, 1 it did not, 3 that cannot be told."""
    from grpo_recipes.proof.verify import verify as verify_run

    verdict = verify_run(_run_path(run), against)
    for line in verdict.lines:
        typer.echo(line)
    typer.echo(verdict.outcome)
    raise typer.Exit(verdict.exit_code)


@app.command()
def diff(a: str, b: str) -> None:
    """Show in what two recipes, or two runs, differ."""
    left, right = _run_or_none(a), _run_or_none(b)
    if left and right:
        from grpo_recipes.proof.diff import diff_runs

        lines = diff_runs(left, right)
    elif left or right:
        recipe_name, run_name = (b, a) if left else (a, b)
        raise UserError(
            f"{run_name} is a run and {recipe_name} is not", where="diff", mend="compare two runs or two recipes"
        )
    else:
        from grpo_recipes.recipe.compose import resolve
        from grpo_recipes.recipe.diff import diff as diff_recipes

        lines = [f"{d.path}: {d.left!r} -> {d.right!r}" for d in diff_recipes(resolve(a), resolve(b))]
    typer.echo("\n".join(lines) if lines else "no difference")


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run, or one of its checkpoints.", autocompletion=_run_names),
    ],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint of the run; default: the newest.")] = None,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder; needs no GPU."""
    from grpo_recipes.engine.export import export_checkpoint

    checkpoint = export_checkpoint(_run_path(source), target, step)
    typer.echo(f"{checkpoint} -> {target}")


@convert_app.command()
def gguf(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
) -> None:
    """Write the model of a GGUF file as safetensors, with its tokenizer and chat template."""
    from grpo_recipes.policy.hf.gguf import convert_gguf

    convert_gguf(source, target)
    typer.echo(target)


@certify_app.command("layout")
def certify_layout(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME[@vN]]",
            help="A recipe, the path of a YAML file, or a folder with a config.json.",
            autocompletion=_recipe_names,
        ),
    ] = None,
    overrides: Overrides = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="A layout such as tp2.pp2.sp; may be repeated. Default: what fits.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="All layouts for up to four processes.")] = False,
    family: Annotated[
        str | None, typer.Option(help="Instead of a recipe: llama, qwen2, qwen3, qwen3_moe or mixtral.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    processes: Annotated[int | None, typer.Option(min=1, help="At most so many processes.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for certificate.json.")] = None,
    plant: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show that no parallel layout changes loss, logprobs, gradients or optimizer steps: 0 none does, 1 one does."""
    gc.enable()
    _one_of("--device", device, ("auto", "cpu", "cuda"))
    _one_of("--precision", precision, ("float32", "bfloat16"))
    name, overrides = _without_recipe(name, overrides, family)
    from grpo_recipes.proof.certificate.command import run

    raise typer.Exit(
        run(
            name,
            overrides or [],
            family=family,
            layouts=layout or [],
            whole_matrix=matrix,
            processes=processes,
            device=device,  # type: ignore[arg-type]  # checked above
            precision=precision,  # type: ignore[arg-type]
            output=output,
            plant=plant,
        )
    )


@certify_app.command("refit")
def certify_refit(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME[@vN]]",
            help="A recipe, the path of a YAML file, or a folder with a config.json.",
            autocompletion=_recipe_names,
        ),
    ] = None,
    overrides: Overrides = None,
    layout: Annotated[
        str | None, typer.Option(help="The trainer's layout, such as tp2.pp2.sp. Default: the recipe's, sizes 2.")
    ] = None,
    transport: Annotated[str, typer.Option(help="ipc, broadcast or safetensors.")] = "ipc",
    family: Annotated[
        str | None, typer.Option(help="Instead of a recipe: llama, qwen2, qwen3, qwen3_moe or mixtral.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Folder for refit_certificate.json.")] = None,
    plant: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show that the trainer's weights arrive at vLLM, bit for bit, twice: 0 they do, 1 they do not."""
    gc.enable()
    _one_of("--transport", transport, ("ipc", "broadcast", "safetensors"))
    _one_of("--device", device, ("auto", "cpu", "cuda"))
    _one_of("--precision", precision, ("float32", "bfloat16"))
    name, overrides = _without_recipe(name, overrides, family)
    from grpo_recipes.proof.refit_certificate.command import run

    raise typer.Exit(
        run(
            name,
            overrides or [],
            family=family,
            layout=layout,
            transport=transport,  # type: ignore[arg-type]  # checked above
            device=device,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            output=output,
            plant=plant,
        )
    )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def experiment(ctx: typer.Context) -> None:
    """NeMo-Run's own commands: list, status, logs, cancel."""
    from grpo_recipes.launch.nemo_run_import import import_nemo_run

    import_nemo_run()
    from nemo_run.cli.experiment import create

    create()(args=ctx.args or ["--help"], prog_name="nemo-run experiment")


def _one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"{value!r} is not known", where=option, mend=f"one of {', '.join(known)}")


def _without_recipe(
    name: str | None, overrides: list[str] | None, family: str | None
) -> tuple[str | None, list[str] | None]:
    """With a family there is no recipe: the first argument is an override, too."""
    if family is not None and name is not None and "=" in name:
        return None, [name, *(overrides or [])]
    return name, overrides


def _mode(rollout_only: bool, train_only: str | None, replay: str | None, resume: str | None) -> Mode:
    from grpo_recipes.runs.mode import Mode

    asked = {"--rollout-only": rollout_only or None, "--train-only": train_only, "--replay": replay, "--resume": resume}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise UserError(
            f"{' and '.join(given)} exclude one another",
            where=given[0],
            mend="give one of them; a run that is resumed stays what it was",
        )
    if rollout_only:
        return Mode("rollout-only")
    source = train_only or replay
    if source is None:
        return Mode()
    return Mode("train-only" if train_only else "replay", str(_run_path(source).absolute()))


def _resumed(name: str, overrides: list[str], run_dir: Path | None, run: str) -> tuple[ResolvedRecipe, Path]:
    from grpo_recipes.recipe.compose import load_resolved
    from grpo_recipes.runs.folder import open_run

    if overrides or run_dir:
        what = overrides[0] if overrides else "--run-dir"
        raise UserError(
            "a run goes on with the recipe and in the folder it started with",
            where="--resume",
            mend=f"leave {what} out, or start a new run",
        )
    folder = _run_path(run)
    resolved = load_resolved(open_run(folder).recipe_path)
    asked, at, asked_version = name.partition("@")
    if not name.endswith((".yaml", ".yml")) and (asked != resolved.name or (at and asked_version != resolved.version)):
        raise UserError(
            f"{folder} is a run of {resolved.name}@{resolved.version}, not of {name}",
            where="--resume",
            mend=f"nemo-run recipe {resolved.name}@{resolved.version} --resume {run}",
        )
    return resolved, folder


def _new_run_dir(recipe_name: str) -> Path:
    base = RUNS / f"{recipe_name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = base, 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def _run_path(run: str) -> Path:
    """A folder as it is; else a name below runs/."""
    path = Path(run)
    return path if path.is_dir() or not (RUNS / run).is_dir() else RUNS / run


def _run_or_none(reference: str) -> Path | None:
    path = _run_path(reference)
    return path if (path / "recipe.yaml").is_file() or (path / "manifest.json").is_file() else None


def _shown(resolved: ResolvedRecipe) -> Iterator[str]:
    """The recipe as YAML, with the origin of each value as a comment."""
    lines = list(_yaml_lines(resolved.recipe.model_dump(mode="json")))
    width = min(max(len(line) for line, path in lines if path), 72)
    for line, path in lines:
        yield f"{line.ljust(width)}  # {resolved.origins[path]}" if path else line


def _yaml_lines(tree: dict[str, Any], prefix: str = "", indent: str = "") -> Iterator[tuple[str, str | None]]:
    """(line, dotted path of the leaf it shows)."""
    import json

    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", None
            yield from _yaml_lines(value, f"{prefix}{key}.", f"{indent}  ")
        else:  # JSON is YAML, and keeps a value on one line
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}", f"{prefix}{key}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    """Entry point: a mistake that a user can mend ends with one message and exit status 2."""
    try:
        app(prog_name="nemo-run")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
