"""report.html: one file about one run, that opens without a network on a phone, a desk, or paper."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.proof.band import ACCURACY, REWARD, Band, find_band, max_steps, read_band, run_seed
from grpo_recipes.proof.charts import SMALL, Area, Line, bar_chart, line_chart, number, stacked_chart
from grpo_recipes.proof.rollout_html import chosen, rollout_card, safe
from grpo_recipes.proof.style import PAGE_CSS
from grpo_recipes.proof.verify import Verdict, verify
from grpo_recipes.runs.files import write_atomically
from grpo_recipes.runs.folder import RunFolder, open_run
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import MetricsRow, read_metrics, series
from grpo_recipes.runs.progress import Progress, read_progress
from grpo_recipes.runs.rollouts import read_rollouts, rollout_steps

# In the order of a step; `evaluation` and `checkpoint` lie between steps.
PHASES = (
    "generation",
    "reward",
    "logprobs",
    "reference_logprobs",
    "policy_training",
    "refit",
    "evaluation",
    "checkpoint",
)
BETWEEN_STEPS = ("evaluation", "checkpoint")
# (heading, metrics that share a chart, log axis); a chart without data is left out.
DYNAMICS = (
    ("Loss", ("train/loss",), False),
    ("Gradient norm, before clipping", ("train/grad_norm",), False),
    ("Learning rate", ("train/learning_rate",), False),
    ("Entropy, nats", ("train/entropy",), False),
    ("KL to the reference policy", ("train/kl",), False),
    ("Share of tokens clipped", ("train/clip_fraction",), False),
    ("Ratio current / old", ("train/ratio_mean", "train/ratio_max"), False),
    ("Response length, tokens", ("train/response_length_mean", "train/response_length_max"), False),
    ("Share of responses cut off", ("train/truncated_fraction",), False),
    ("Share of prompts without variance", ("train/zero_variance_fraction",), False),
    ("Mean size of the advantage", ("train/advantage_abs_mean",), False),
    ("Grader errors", ("train/grader_errors",), False),
    ("Skipped optimizer steps", ("train/bad_steps",), False),
)
MISMATCH = (
    ("Divergence of sampler and trainer (k3)", ("train/gen_kl_error",), True),
    ("Largest difference of a logprob", ("train/logprob_diff_max",), True),
    ("Mean of exp |difference| of logprobs, less 1", ("train/token_mult_prob_error",), True),
)
OUTCOMES = {
    "reproduced": "Reproduced: this run lies inside the reference band.",
    "not reproduced": "Not reproduced: this run lies outside the reference band.",
    "cannot tell": "It cannot be told whether this run reproduces the reference.",
}


def write_report(run_dir: str | Path, against: str | Path | None = None) -> Path:
    """Write <run>/report.html, of a finished run or one that goes on. against: as for `verify`.

    Raises:
        UserError: no such run, or a damaged file in it.
    """
    folder = open_run(run_dir)
    manifest = read_manifest(folder)
    reference = Path(against) if against else find_band(manifest["recipe"]["name"])
    band = None
    if reference:
        band = read_band(reference / "reference.json" if reference.is_dir() else reference)
        recipe = manifest["recipe"]
        band = band if (band.recipe, band.version) == (recipe["name"], recipe["version"]) else None
    rows = read_metrics(folder.metrics_path)
    verdict = verify(folder.path, against)
    write_atomically(folder.report_path, page(folder, manifest, rows, band, verdict))
    return folder.report_path


def page(
    folder: RunFolder, manifest: Mapping[str, Any], rows: Sequence[MetricsRow], band: Band | None, verdict: Verdict
) -> str:
    recipe = manifest["recipe"]
    title = f"{recipe['name']}@{recipe['version']}"
    sections = [
        _header(folder, title, manifest, rows, read_progress(folder)),
        _verdict(verdict),
        _tiles(rows),
        _section("Learning", f'<div class="wide">{_learning(rows, band)}</div>'),
        _section("Where the time goes", _time(rows)),
        _section("Peak memory by phase", _memory(rows)),
        _section("Sampler against trainer", _mismatch(rows) + _worst(folder)),
        _section("Optimisation", _grid(rows, DYNAMICS)),
        _section("Rollouts", _rollouts(folder)),
        _section("Manifest", _manifest(manifest)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # The browser itself refuses whatever would reach for the network or run a script.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{safe(title)} · {safe(folder.name)}</title><style>{PAGE_CSS}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def reference_area(band: Band | None, name: str) -> Area | None:
    curve = band.curves.get(name) if band else None
    if band is None or curve is None:
        return None
    return Area(f"reference, lowest to highest of {len(band.seeds)} seeds", curve.steps, curve.low, curve.high)


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>{body}</section>" if body else ""


def _header(
    folder: RunFolder,
    title: str,
    manifest: Mapping[str, Any],
    rows: Sequence[MetricsRow],
    progress: Progress | None,
) -> str:
    recipe, hardware = manifest["recipe"], manifest["hardware"]
    done = max((row.step for row in rows if row.kind == "train"), default=0)
    where = ", ".join(hardware["gpus"]) or f"{hardware['cores']} cores of {hardware['cpu']}"
    words = [f"{done} of {max_steps(manifest)} steps with seed {run_seed(manifest)} on {safe(where)}."]
    accuracy, reward = series(rows, ACCURACY), series(rows, REWARD)
    if len(accuracy) > 1:
        problems = series(rows, "val/num_problems")
        held_out = f"{problems[-1][1]:.0f} held-out problems" if problems else "held-out problems"
        words.append(
            f"Accuracy on {held_out} went from {number(accuracy[0][1], True)} to {number(accuracy[-1][1], True)}."
        )
    if reward:
        tenth = max(len(reward) // 10, 1)
        first, last = (sum(v for _, v in part) / tenth for part in (reward[:tenth], reward[-tenth:]))
        words.append(f"Reward went from {number(first)} to {number(last)} (first and last tenth of the steps).")
    code = manifest["code"]
    git = code["git"]
    commit = f"commit {git['commit'][:12]}{', with uncommitted changes' if git['dirty'] else ''}" if git else "no git"
    status = f"{safe(progress.status)}. {safe(progress.message)}" if progress else "not started."
    return (
        f'<header><p class="soft small">{safe(folder.name)}</p><h1>{safe(title)}</h1><p>{" ".join(words)}</p>'
        f'<p class="soft small">Recipe digest <code>{safe(recipe["digest"])}</code> · {safe(commit)} · sources '
        f"<code>{safe(code['sources_sha256'][:12])}</code> · {len(manifest['attempts'])} attempt(s), begun "
        f"{safe(manifest['attempts'][0]['started'])} · {status}</p></header>"
    )


def _verdict(verdict: Verdict) -> str:
    lines = "".join(f"<li>{safe(line)}</li>" for line in verdict.lines)
    style = verdict.outcome.replace(" ", "-")
    return f'<div class="verdict {style}"><b>{OUTCOMES[verdict.outcome]}</b><ul>{lines}</ul></div>'


def _tiles(rows: Sequence[MetricsRow]) -> str:
    train = [row for row in rows if row.kind == "train"]
    tiles = []
    for name, label, percent in (
        (ACCURACY, "accuracy, last evaluation", True),
        ("val/greedy_accuracy", "accuracy, greedy", True),
        (REWARD, "reward, last step", False),
    ):
        values = series(rows, name)
        tiles += [(number(values[-1][1], percent), label)] if values else []
    for name, label in (
        ("total", "seconds a step, median"),
        ("generation_tokens_per_s", "tokens/s, generation"),
        ("training_tokens_per_s", "tokens/s, training"),
    ):
        values_sorted = sorted(row.timing[name] for row in train if name in row.timing)
        tiles += [(number(values_sorted[len(values_sorted) // 2]), label)] if values_sorted else []
    peaks = [value for row in rows for value in row.memory.values()]
    tiles += [(f"{number(max(peaks) / 2**30)} GiB", "peak memory")] if peaks else []
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
        + "</div>"
    )


def _learning(rows: Sequence[MetricsRow], band: Band | None) -> str:
    def chart(heading: str, name: str, others: Sequence[Line] = (), percent: bool = False) -> str:
        area = reference_area(band, name)
        lines = [Line("this run", series(rows, name)), *others]
        if band and area:
            lines.append(Line("reference, mean", list(zip(area.x, band.curves[name].mean, strict=True)), "ref"))
        y_range = (0.0, 1.0) if percent else None
        return _figure(heading, line_chart(heading, lines, area=area, percent=percent, y_range=y_range))

    greedy = series(rows, "val/greedy_accuracy")
    others = [Line("greedy", greedy, "s3 alt")] if greedy else []
    accuracy = chart("Accuracy on held-out problems", ACCURACY, others, True)
    return accuracy + (chart("Reward of the rollouts", REWARD) if series(rows, REWARD) else "")


def _time(rows: Sequence[MetricsRow]) -> str:
    by_phase = phase_seconds(rows)
    steps = [row.step for row in rows if row.kind == "train"]
    if not by_phase or not steps:
        return ""
    all_seconds = {name: sum(values.values()) for name, values in by_phase.items()}
    total = sum(all_seconds.values()) or 1.0
    filled = {name: [values.get(step, 0.0) for step in steps] for name, values in by_phase.items()}
    lines = "".join(
        f"<tr><td>{safe(name)}</td><td>{number(seconds / len(steps))}</td><td>{number(seconds / total, True)}</td>"
        f"<td>{number(seconds)}</td></tr>"
        for name, seconds in all_seconds.items()
    )
    inside = {name: values for name, values in filled.items() if name not in BETWEEN_STEPS}
    chart = _figure("Seconds of each step", stacked_chart("Seconds of each step", steps, inside, "s"))
    table = (
        "<table><thead><tr><th>phase</th><th>s a step</th><th>share</th><th>s in all</th></tr></thead>"
        f"<tbody>{lines}<tr><td><b>all</b></td><td>{number(total / len(steps))}</td><td>100.0 %</td>"
        f"<td>{number(total)}</td></tr></tbody></table>"
    )
    return f'<div class="wide">{chart}<figure>{table}</figure></div>'


def phase_seconds(rows: Sequence[MetricsRow]) -> dict[str, dict[int, float]]:
    """Seconds by phase and step. "other" is what the phases inside a step leave of its total."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        inside = 0.0
        for name in PHASES:
            seconds = row.timing.get(name)
            if seconds is not None and math.isfinite(seconds):
                found.setdefault(name, {})[row.step] = seconds
                inside += 0.0 if name in BETWEEN_STEPS else seconds
        if row.kind == "train" and "total" in row.timing:
            found.setdefault("other", {})[row.step] = max(row.timing["total"] - inside, 0.0)
    return {name: found[name] for name in (*PHASES, "other") if name in found}


def _memory(rows: Sequence[MetricsRow]) -> str:
    peaks: dict[str, float] = {}
    for row in rows:
        for name, value in row.memory.items():
            phase = name.removeprefix("peak_")
            peaks[phase] = max(peaks.get(phase, 0.0), value / 2**20)
    order = [*(p for p in PHASES if p in peaks), *(p for p in peaks if p not in PHASES)]
    bars = {phase: peaks[phase] for phase in order}
    chart = _figure("", bar_chart("Peak memory by phase", bars, "MiB"))
    return f'<div class="wide">{chart}</div>' if bars else ""


def _grid(rows: Sequence[MetricsRow], charts: Sequence[tuple[str, Sequence[str], bool]]) -> str:
    figures = []
    for heading, names, log in charts:
        lines = [
            Line(name.partition("/")[2].replace("_", " "), _drawn(rows, name), f"s{i}")
            for i, name in enumerate(names, start=1)
            if series(rows, name)
        ]
        if lines:
            figures.append(_figure(heading, line_chart(heading, lines, log=log, size=SMALL)))
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def _mismatch(rows: Sequence[MetricsRow]) -> str:
    note = "The same tokens, judged by both at the same temperature with the weights that sampled them."
    charts = _grid(rows, MISMATCH)
    return charts and f'<p class="soft small">{note}</p>{charts}'


def _worst(folder: RunFolder) -> str:
    """The responses of the last step that have it on record, of which sampler and trainer differ most."""
    for step in reversed(rollout_steps(folder)):
        measured = [r for r in read_rollouts(folder, step) if r.mult_prob_error is not None]
        if measured:
            measured.sort(key=lambda r: -(r.mult_prob_error or 0.0))
            cards = "".join(map(rollout_card, measured[:3]))
            return f"<details><summary>Worst responses of step {step}</summary><div>{cards}</div></details>"
    return ""


def _drawn(rows: Sequence[MetricsRow], name: str) -> list[tuple[int, float]]:
    """A ratio that is 1 to many digits says nothing until the 1 is taken off."""
    less = 1.0 if name == "train/token_mult_prob_error" else 0.0
    return [(step, value - less) for step, value in series(rows, name)]


def _figure(heading: str, chart: str) -> str:
    return f"<figure>{f'<h3>{safe(heading)}</h3>' if heading else ''}{chart}</figure>"


def _rollouts(folder: RunFolder) -> str:
    steps = rollout_steps(folder)
    if not steps:
        return ""
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]}, reverse=True)
    parts = [
        f"<details{' open' if step == shown[0] else ''}><summary>Step {step}</summary>"
        f'<div class="grid">{"".join(map(rollout_card, chosen(read_rollouts(folder, step))))}</div></details>'
        for step in shown
    ]
    note = "The stronger a token is marked, the less likely it was when it was drawn."
    return f'<p class="soft small">{note}</p>' + "".join(parts)


def _manifest(manifest: Mapping[str, Any]) -> str:
    parts = []
    for key, value in manifest.items():
        text = json.dumps(value, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>{safe(key)}</summary><pre>{safe(text)}</pre></details>")
    return "".join(parts)
