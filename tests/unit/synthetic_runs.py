"""Made-up runs for the tests of proof/: learning curves of the kind a small recipe shows, and whole run folders."""

from __future__ import annotations

import math
import random
from pathlib import Path

from grpo_recipes.proof.band import Band, Curve
from grpo_recipes.runs.folder import RunFolder, create_run
from grpo_recipes.runs.manifest import write_manifest
from grpo_recipes.runs.metrics import MetricsLog, MetricsRow
from grpo_recipes.runs.progress import Progress, write_progress
from grpo_recipes.runs.rollouts import Rollout, write_rollouts

STEPS, PERIOD, PROBLEMS = 150, 10, 256
EVALUATED = tuple(range(0, STEPS + 1, PERIOD))
PHASES = {"generation": 0.09, "reward": 0.004, "logprobs": 0.03, "policy_training": 0.25, "refit": 0.005}


def manifest(seed: int = 0, **full) -> dict:
    values = {
        "grpo": {"seed": seed, "max_num_steps": STEPS, "val_period": PERIOD},
        "logger": {"wandb": False},
        **full,
    }
    return {
        "schema_version": 1,
        "recipe": {
            "name": "tiny_arith", "version": "v1", "digest": f"digest-{seed}-{full}",
            "overrides": [f"grpo.seed={seed}"], "explicit": values, "full": values,
        },
        "command": ["nemo-run", "recipe", "tiny_arith", f"grpo.seed={seed}"],
        "code": {"sources_sha256": "c0de", "git": {"commit": "1" * 40, "dirty": False, "diff_sha256": None}},
        "software": {"python": "3.12.9", "os": "Linux", "packages": {"torch": "2.11.0"}},
        "hardware": {"cpu": "A CPU", "cores": 2, "memory_bytes": 2**34, "gpus": []},
        "seeds": {"run": seed},
        "inputs": {"model": {"model.safetensors": "aa"}, "train_rows": "bb"},
        "backends": {"attention": "sdpa"},
        "attempts": [
            {"attempt": 1, "started": "2026-01-01T00:00:00+00:00", "resumed_from": 0, "sources_sha256": "c0de"}
        ],
    }  # fmt: skip


def true_accuracy(rng: random.Random) -> list[float]:
    """Of one honest seed at each step: a rise from about 0.44 to about 0.93 whose pace and end vary by seed."""
    start, end = rng.gauss(0.44, 0.01), min(rng.gauss(0.93, 0.015), 0.995)
    pace, wander = math.exp(rng.gauss(math.log(45), 0.15)), 0.0
    curve = []
    for step in range(STEPS + 1):
        wander = 0.9 * wander + rng.gauss(0, 0.004)
        curve.append(min(max(end - (end - start) * math.exp(-step / pace) + wander, 0.0), 1.0))
    return curve


def measure(rng: random.Random, rate: float, trials: int = PROBLEMS) -> float:
    return rng.binomialvariate(trials, rate) / trials


def rows_of(curve: list[float], rng: random.Random, mismatch: float = 2e-12) -> list[MetricsRow]:
    rows = []
    for step in range(STEPS + 1):
        if step:
            metrics = {
                "train/reward": measure(rng, curve[step], 512),
                "train/gen_kl_error": mismatch * math.exp(rng.gauss(0, 0.3)),
                "train/bad_steps": 0.0,
            }
            rows.append(MetricsRow(1, step, "train", metrics))
        if step % PERIOD == 0:
            accuracy = {"val/accuracy": measure(rng, curve[step]), "val/num_problems": float(PROBLEMS)}
            rows.append(MetricsRow(1, step, "val", accuracy))
    return rows


def honest_rows(seed: int) -> list[MetricsRow]:
    rng = random.Random(seed)
    return rows_of(true_accuracy(rng), rng)


def band_of(runs: dict[int, list[MetricsRow]]) -> Band:
    """The band of runs that were never written to disk."""
    one = manifest()
    curves = {}
    for name in ("val/accuracy", "val/num_problems", "train/reward", "train/gen_kl_error"):
        own = [[(row.step, row.metrics[name]) for row in rows if name in row.metrics] for rows in runs.values()]
        curves[name] = Curve(tuple(s for s, _ in own[0]), tuple(tuple(v for _, v in values) for values in own))
    return Band(
        recipe="tiny_arith", version="v1", digests=tuple(manifest(seed)["recipe"]["digest"] for seed in runs),
        full=one["recipe"]["full"], seeds=tuple(runs), inputs=one["inputs"], hardware=(one["hardware"],),
        software=one["software"], runs=tuple({"seed": seed, "sources_sha256": "c0de"} for seed in runs), curves=curves,
    )  # fmt: skip


def write_run(path: Path, seed: int, *, last: int = STEPS, hostile: str = "") -> RunFolder:
    """A whole run folder, with every metric the engine writes. `hostile`: text put wherever a model may put text."""
    rng = random.Random(seed)
    run = create_run(path)
    write_manifest(run, manifest(seed))
    log = MetricsLog(run, 1)
    for row in rows_of(true_accuracy(rng), rng):
        if row.step > last:
            break
        learnt = row.step / STEPS
        if row.kind == "val":
            extra = {"val/greedy_accuracy": min(row.metrics["val/accuracy"] + 0.05, 1.0), "val/accuracy_stderr": 0.02}
            log.append(row.step, "val", {**row.metrics, **extra}, {"evaluation": rng.gauss(0.5, 0.02)})
            continue
        metrics = {
            **row.metrics,
            "train/reward_std": 0.5 - 0.3 * learnt,
            "train/loss": rng.gauss(0, 0.02),
            "train/kl": 0.002 * learnt,
            "train/entropy": 0.5 * math.exp(-3 * learnt) + rng.gauss(0, 0.01),
            "train/clip_fraction": abs(rng.gauss(0.02, 0.01)),
            "train/ratio_mean": 1 + rng.gauss(0, 1e-3),
            "train/ratio_max": 1.5 + abs(rng.gauss(0, 0.2)),
            "train/grad_norm": math.exp(rng.gauss(-1, 0.3)),
            "train/learning_rate": 2e-4 * min(1, row.step / 10),
            "train/response_length_mean": 4 - 0.5 * learnt + rng.gauss(0, 0.05),
            "train/response_length_max": 8.0,
            "train/truncated_fraction": max(rng.gauss(0.05 - 0.05 * learnt, 0.01), 0.0),
            "train/zero_variance_fraction": 0.1 + 0.6 * learnt + rng.gauss(0, 0.03),
            "train/token_mult_prob_error": 1 + abs(rng.gauss(0, 2e-7)),
            "train/logprob_diff_max": abs(rng.gauss(0, 2e-6)),
            "train/grader_errors": 0.0,
        }
        timing = {name: seconds * math.exp(rng.gauss(0, 0.1)) for name, seconds in PHASES.items()}
        timing |= {"total": sum(timing.values()) + 0.01, "checkpoint": 0.12 if row.step % PERIOD == 1 else 0.0,
                   "generation_tokens_per_s": rng.gauss(21000, 500),
                   "training_tokens_per_s": rng.gauss(9000, 200)}  # fmt: skip
        memory = {f"peak_{name}": (600 + 40 * i) * 2**20 for i, name in enumerate(PHASES)}
        log.append(row.step, "train", metrics, timing, memory)
        if row.step in (1, 75, 150):
            write_rollouts(run, row.step, rollouts(rng, learnt, hostile))
    write_progress(run, Progress(1, min(last, STEPS), STEPS, "done", 0.9, 0.92, 1e4, 1000.0, 1100.0, "finished"))
    return run


def rollouts(rng: random.Random, learnt: float, hostile: str) -> list[Rollout]:
    items = []
    for group in range(4):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        for _ in range(2):
            right = rng.random() < 0.4 + 0.5 * learnt
            tokens = (*tuple(str(a + b + (0 if right else rng.choice([-10, 1, 10])))), "<eos>")
            sampler = tuple(-rng.expovariate(4 + 30 * learnt) for _ in tokens)
            text = "".join(tokens[:-1])
            items.append(
                Rollout(
                    prompt=f"{a}+{b}={hostile}", response=text + hostile, reward=float(right),
                    advantage=0.9 if right else -1.1, finish_reason="stop", tokens=tuple(t + hostile for t in tokens),
                    token_ids=tuple(range(len(tokens))), logprobs=sampler, trainer_logprobs=sampler, group=group,
                    answer=str(a + b),
                )
            )  # fmt: skip
    items.append(Rollout(f"1+1={hostile}", hostile or "…", None, None, "length", error=f"grader timed out {hostile}"))
    return items
