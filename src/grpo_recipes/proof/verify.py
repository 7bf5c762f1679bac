"""Did a run reproduce the published curve? The rules, in the order in which they are applied (docs/verify.md):

It cannot be told (exit 3) where the question makes no sense: no reference, another recipe (any value that is not
neutral, see band.NEUTRAL), other model or data, a run with gaps, a band of fewer than three seeds, or one so wide
that a model which learns nothing would pass.

Otherwise the run must pass every one of at most five checks against the n seeds of the reference:

1. final: accuracy, mean of the last three evaluations;
2. mean: height of the whole accuracy curve (area under it over the steps);
3. half and 4. most of the rise: the steps at which accuracy has made 50 % and 80 % of the reference's own rise;
5. mismatch: mean divergence between the sampler's logprobs and the trainer's, not above what the reference shows.

Checks 1 and 2 use the 99 % prediction interval mean ± t(0.995, n-1) · s · sqrt(1 + 1/n), widened in quadrature by
2.576 · e · sqrt(1 + 1/n), e being the standard error of an accuracy measured on a finite number of problems: a few
seeds may agree by luck more closely than such a measurement can. For 3 and 4 one evaluation period is
added, since nothing is known between evaluations. 5 allows the larger of the interval's upper end, ten times the
highest reference run, and 1e-6: kernels and precisions of other hardware differ by factors, stale weights by orders.
Each check fails an honest run with a probability of 1 % at most, so all together in 5 % at most (Bonferroni): of 20
honest seeds, 19 are expected to pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.proof.band import (
    ACCURACY,
    MISMATCH,
    NUM_PROBLEMS,
    Band,
    Curve,
    find_band,
    max_steps,
    missing_training_steps,
    read_band,
    recipe_differences,
    run_seed,
)
from grpo_recipes.proof.statistics import Z_995, area_weights, binomial_variance, prediction_half_width, time_to
from grpo_recipes.runs.folder import open_run
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import MetricsRow, read_metrics, series

Outcome = Literal["reproduced", "not reproduced", "cannot tell"]
EXIT_CODES: dict[Outcome, int] = {"reproduced": 0, "not reproduced": 1, "cannot tell": 3}
MIN_SEEDS = 3
LAST_EVALUATIONS = 3
MISMATCH_FACTOR, MISMATCH_FLOOR = 10.0, 1e-6


@dataclass(frozen=True)
class Check:
    """One number of the run against what the reference allows."""

    name: str
    value: float
    low: float
    high: float
    percent: bool = False

    @property
    def passed(self) -> bool:
        return self.low <= self.value <= self.high  # false for nan

    def __str__(self) -> str:
        value = "never" if self.value == math.inf else self._show(self.value)
        verdict = "inside" if self.passed else "OUTSIDE"
        return f"{self.name}: {value}, {verdict} {self._show(self.low)} to {self._show(self.high)}"

    def _show(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    lines: tuple[str, ...]  # the reasons, one a line, for people
    checks: tuple[Check, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def verify(run_dir: str | Path, against: str | Path | None = None) -> Verdict:
    """Judge a run.

    Args:
        against: a reference.json, or the folder that holds one; default: the published one of the run's recipe.

    Raises:
        UserError: no such run, or a damaged manifest, metrics or reference file.
    """
    folder = open_run(run_dir)
    manifest = read_manifest(folder)
    path = Path(against) if against else find_band(manifest["recipe"]["name"])
    if path is None:
        name = manifest["recipe"]["name"]
        return Verdict("cannot tell", (f"there is no reference of {name}; name one with --against",))
    band = read_band(path / "reference.json" if path.is_dir() else path)
    return judge(manifest, read_metrics(folder.metrics_path), band)


def judge(manifest: Mapping[str, Any], rows: Sequence[MetricsRow], band: Band) -> Verdict:
    """`verify` on data that has been read."""
    notes = tuple(_notes(manifest, rows, band))
    doubts = tuple(_doubts(manifest, rows, band))
    if doubts:
        return Verdict("cannot tell", (*doubts, *notes))
    checks = tuple(_checks(rows, band))
    if checks[0].low <= band.curves[ACCURACY].mean[0]:
        doubt = "the reference's seeds differ so much that a model which learns nothing would pass"
        return Verdict("cannot tell", (doubt, *map(str, checks), *notes), checks)
    outcome: Outcome = "reproduced" if all(check.passed for check in checks) else "not reproduced"
    count = f"{len(checks)} checks against {len(band.seeds)} seeds, each at 99 %, together at 95 % or more"
    return Verdict(outcome, (count, *map(str, checks), *notes), checks)


def _doubts(manifest: Mapping[str, Any], rows: Sequence[MetricsRow], band: Band) -> Iterator[str]:
    """Why the run and the reference cannot be compared."""
    recipe = manifest["recipe"]
    if (recipe["name"], recipe["version"]) != (band.recipe, band.version):
        yield (f"the run is of {recipe['name']}@{recipe['version']}, the reference of {band.recipe}@{band.version}")
        return
    if recipe["digest"] not in band.digests:
        differences = recipe_differences(band.full, manifest)
        yield from (f"another recipe: {difference}" for difference in differences[:8])
        if len(differences) > 8:
            yield f"another recipe: {len(differences) - 8} further values"
    for key in sorted(band.inputs.keys() | manifest["inputs"].keys()):
        if band.inputs.get(key) != manifest["inputs"].get(key):
            yield f"other inputs: the digest of {key} is not the reference's"
    if len(band.seeds) < MIN_SEEDS:
        yield f"the reference has {len(band.seeds)} seeds; {MIN_SEEDS} or more are needed"
    reference = band.curves.get(ACCURACY)
    if reference is None or len(reference.steps) < LAST_EVALUATIONS + 1:
        yield f"the reference has fewer than {LAST_EVALUATIONS + 1} evaluations"
        return
    last = max_steps(manifest)
    missing = missing_training_steps(rows, last)
    if missing:
        yield f"the run is not complete: {len(missing)} of {last} steps are missing, the first is {missing[0]}"
    if MISMATCH in band.curves and not series(rows, MISMATCH):
        yield f"the run has no {MISMATCH}"
    evaluated = {step for step, _ in series(rows, ACCURACY)}
    unevaluated = [step for step in reference.steps if step not in evaluated]
    if unevaluated:
        yield f"the run is not complete: {len(unevaluated)} evaluations are missing, the first at step {unevaluated[0]}"


def _notes(manifest: Mapping[str, Any], rows: Sequence[MetricsRow], band: Band) -> Iterator[str]:
    """What does not decide but should be known."""
    code = manifest["code"]
    if code["sources_sha256"] not in {run["sources_sha256"] for run in band.runs}:
        yield "note: the code is not the reference's (sources differ)"
    if code["git"] and code["git"]["dirty"]:
        yield "note: the code had uncommitted changes"
    hashes = {attempt.get("sources_sha256") for attempt in manifest["attempts"]}
    if len(hashes) > 1:
        yield "note: the run was resumed with other code than it began with"
    if len(manifest["attempts"]) > 1:
        yield f"note: the run took {len(manifest['attempts'])} attempts"
    if manifest["hardware"] not in band.hardware:
        yield "note: the hardware is not the reference's"
    if run_seed(manifest) in band.seeds:
        yield f"note: seed {run_seed(manifest)} is one of the reference's own"
    for name, what in (("train/bad_steps", "skipped optimizer steps"), ("train/grader_errors", "failed gradings")):
        total = sum(value for _, value in series(rows, name))
        if total:
            yield f"note: {total:g} {what}"


def _checks(rows: Sequence[MetricsRow], band: Band) -> Iterator[Check]:
    reference = band.curves[ACCURACY]
    steps = reference.steps
    measured = dict(series(rows, ACCURACY))
    run = [measured[step] for step in steps]
    problems = _num_problems(band)

    count = len(steps)
    last = [0.0] * (count - LAST_EVALUATIONS) + [1 / LAST_EVALUATIONS] * LAST_EVALUATIONS
    yield _level_check(
        f"final accuracy, mean of the last {LAST_EVALUATIONS} evaluations", reference, run, last, problems
    )
    yield _level_check("mean accuracy over all steps", reference, run, area_weights(steps), problems)

    start, end = reference.mean[0], statistics.fmean(reference.mean[-LAST_EVALUATIONS:])
    for share in (0.5, 0.8):
        level = start + share * (end - start)
        times = [time_to(level, steps, row) for row in reference.values]
        if end > start and max(times) < math.inf:
            period = max(b - a for a, b in pairwise(steps))
            half = prediction_half_width(times) + period
            mean = statistics.fmean(times)
            name = f"steps to {share:.0%} of the rise (accuracy {100 * level:.1f} %)"
            yield Check(name, time_to(level, steps, run), max(mean - half, 0.0), mean + half)

    mismatch = [abs(value) for _, value in series(rows, MISMATCH)]
    if mismatch and MISMATCH in band.curves:
        levels = [statistics.fmean(map(abs, row)) for row in band.curves[MISMATCH].values]
        upper = statistics.fmean(levels) + prediction_half_width(levels)
        limit = max(upper, MISMATCH_FACTOR * max(levels), MISMATCH_FLOOR)
        yield Check(f"mismatch of sampler and trainer, mean {MISMATCH}", statistics.fmean(mismatch), 0.0, limit)


def _level_check(
    name: str, reference: Curve, run: Sequence[float], weights: Sequence[float], problems: int | None
) -> Check:
    """A weighted mean of the accuracy curve."""

    def level(curve: Sequence[float]) -> float:
        return sum(w * y for w, y in zip(weights, curve, strict=True))

    levels = [level(row) for row in reference.values]
    mean = statistics.fmean(levels)
    sampling = 0.0
    if problems:
        one_run = sum(w * w * binomial_variance(p, problems) for w, p in zip(weights, reference.mean, strict=True))
        sampling = Z_995 * math.sqrt(one_run * (1 + 1 / len(levels)))
    half = math.hypot(prediction_half_width(levels), sampling)
    return Check(name, level(run), max(mean - half, 0.0), min(mean + half, 1.0), percent=True)


def _num_problems(band: Band) -> int | None:
    curve = band.curves.get(NUM_PROBLEMS)
    return int(min(min(row) for row in curve.values)) if curve else None
