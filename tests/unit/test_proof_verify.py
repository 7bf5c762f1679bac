import random
from dataclasses import replace

import pytest
from synthetic_runs import EVALUATED, STEPS, band_of, honest_rows, manifest, rows_of, true_accuracy, write_run

from grpo_recipes.errors import UserError
from grpo_recipes.proof.band import Curve, make_band, write_band
from grpo_recipes.proof.verify import judge, verify
from grpo_recipes.runs.metrics import MetricsLog


@pytest.fixture(scope="module")
def band():
    return band_of({seed: honest_rows(seed) for seed in range(5)})


def faulty(curve_of, seed=77, **options):
    rng = random.Random(seed)
    return rows_of(curve_of(true_accuracy(rng)), rng, **options)


def failed(verdict):
    return [check.name.split(",")[0].split(" (")[0] for check in verdict.checks if not check.passed]


def test_of_200_honest_seeds_at_least_95_percent_pass():
    verdicts = []
    for group in range(20):
        band = band_of({seed: honest_rows(1000 * group + seed) for seed in range(5)})
        verdicts += [judge(manifest(999), honest_rows(1000 * group + 500 + i), band) for i in range(10)]
    outcomes = [verdict.outcome for verdict in verdicts]
    assert set(outcomes) <= {"reproduced", "not reproduced"}
    assert outcomes.count("reproduced") >= 190


def test_an_honest_run_is_reproduced_and_says_by_what(band):
    verdict = judge(manifest(999), honest_rows(999), band)
    assert (verdict.outcome, verdict.exit_code) == ("reproduced", 0)
    assert verdict.lines[0] == "5 checks against 5 seeds, each at 99 %, together at 95 % or more"
    assert len(verdict.lines) == 6
    assert all("inside" in line for line in verdict.lines[1:])


@pytest.mark.parametrize("seed", range(70, 80))
def test_shuffled_rewards_fail(band, seed):
    # Covers: rewards that do not belong to their responses
    verdict = judge(manifest(999), faulty(lambda curve: [curve[0]] * len(curve), seed), band)
    assert (verdict.outcome, verdict.exit_code) == ("not reproduced", 1)
    assert "final accuracy" in failed(verdict)
    assert "steps to 80% of the rise" in failed(verdict)


@pytest.mark.parametrize("seed", range(70, 80))
def test_an_advantage_of_the_wrong_sign_fails(band, seed):
    verdict = judge(manifest(999), faulty(lambda curve: [max(2 * curve[0] - y, 0.0) for y in curve], seed), band)
    assert verdict.outcome == "not reproduced"
    assert "final accuracy" in failed(verdict)


def test_stale_weights_fail_by_the_mismatch_even_where_the_curve_is_right(band):
    # Covers: the sampler goes on with old weights after a refit
    verdict = judge(manifest(999), faulty(lambda curve: curve, mismatch=1e-3), band)
    assert verdict.outcome == "not reproduced"
    assert failed(verdict) == ["mismatch of sampler and trainer"]


def test_mismatch_of_another_precision_by_a_small_factor_is_honest(band):
    assert judge(manifest(999), faulty(lambda curve: curve, seed=5, mismatch=1.5e-11), band).outcome == "reproduced"


def test_learning_at_a_third_of_the_pace_fails(band):
    verdict = judge(manifest(999), faulty(lambda curve: [curve[i // 3] for i in range(len(curve))]), band)
    assert verdict.outcome == "not reproduced"


def test_a_collapse_at_the_end_fails(band):
    verdict = judge(manifest(999), faulty(lambda curve: [*curve[: STEPS - 19], *[0.5] * 20]), band)
    assert failed(verdict) == ["final accuracy"]


def test_accuracy_beyond_the_band_fails_too(band):
    # e.g. evaluated on the training problems
    narrow = band_of(
        {s: rows_of([min(0.6, y) for y in true_accuracy(random.Random(s))], random.Random(s)) for s in range(5)}
    )
    assert "final accuracy" in failed(judge(manifest(999), honest_rows(999), narrow))


def test_nan_accuracy_fails(band):
    verdict = judge(manifest(999), [replace(r, metrics={**r.metrics, "val/accuracy": float("nan")})
                                    if r.kind == "val" else r for r in honest_rows(9)], band)  # fmt: skip
    assert verdict.outcome == "not reproduced"


def cannot_tell(verdict, *words):
    assert (verdict.outcome, verdict.exit_code) == ("cannot tell", 3)
    for word in words:
        assert any(word in line for line in verdict.lines), verdict.lines


def test_another_recipe_cannot_be_told_and_the_key_is_named(band):
    other = manifest(999)
    other["recipe"]["full"] = {**other["recipe"]["full"], "grpo": {"seed": 9, "max_num_steps": 150, "val_period": 5}}
    cannot_tell(judge(other, honest_rows(9), band), "grpo.val_period: 10 in the reference, 5 here")


def test_a_key_that_only_the_run_sets_cannot_be_told(band):
    cannot_tell(judge(manifest(999, loss_fn={"ratio_clip_c": 3}), honest_rows(9), band), "loss_fn.ratio_clip_c")


def test_a_new_default_and_neutral_keys_change_nothing(band):
    other = manifest(999, logger={"wandb": True}, checkpointing={"save_period": 3})
    other["recipe"]["full"] = {**other["recipe"]["full"], "loss_fn": {"new_option": False}}
    assert judge(other, honest_rows(9), band).outcome == "reproduced"


def test_where_the_model_lies_changes_nothing(band):
    band = replace(band, full={**band.full, "policy": {"model_name": "there", "precision": "float32"}})
    same = manifest(999, policy={"model_name": "here", "precision": "float32"})
    assert judge(same, honest_rows(9), band).outcome == "reproduced"
    other = manifest(999, policy={"model_name": "there", "precision": "bfloat16"})
    cannot_tell(judge(other, honest_rows(9), band), "policy.precision")


def test_another_version_model_or_dataset_cannot_be_told(band):
    other = manifest(999)
    other["recipe"]["version"] = "v2"
    cannot_tell(judge(other, honest_rows(9), band), "tiny_arith@v2")
    other = manifest(999)
    other["inputs"] = {**other["inputs"], "train_rows": "zz"}
    cannot_tell(judge(other, honest_rows(9), band), "digest of train_rows")


def test_gaps_cannot_be_told(band):
    rows = honest_rows(9)
    cannot_tell(judge(manifest(9), [r for r in rows if r.step <= 120], band), "30 of 150 steps", "first is 121")
    cannot_tell(judge(manifest(9), [r for r in rows if (r.kind, r.step) != ("train", 7)], band), "first is 7")
    cannot_tell(judge(manifest(9), [r for r in rows if (r.kind, r.step) != ("val", 20)], band), "first at step 20")


def test_a_run_that_does_not_say_its_mismatch_cannot_be_told(band):
    rows = [replace(r, metrics={k: v for k, v in r.metrics.items() if "gen_kl" not in k}) for r in honest_rows(9)]
    cannot_tell(judge(manifest(9), rows, band), "no train/gen_kl_error")


def test_a_poor_reference_cannot_be_told():
    cannot_tell(judge(manifest(9), honest_rows(9), band_of({s: honest_rows(s) for s in range(2)})), "2 seeds")
    one_failed = {s: honest_rows(s) for s in range(4)} | {4: faulty(lambda curve: [curve[0]] * len(curve))}
    cannot_tell(judge(manifest(9), honest_rows(9), band_of(one_failed)), "learns nothing would pass")
    sparse = band_of({s: honest_rows(s) for s in range(5)})
    curve = sparse.curves["val/accuracy"]
    sparse.curves["val/accuracy"] = Curve(curve.steps[:2], tuple(row[:2] for row in curve.values))
    cannot_tell(judge(manifest(9), honest_rows(9), sparse), "fewer than 4 evaluations")


def test_equal_seeds_leave_the_sampling_error_of_the_evaluation():
    rows = honest_rows(0)
    final = judge(manifest(9), honest_rows(9), band_of(dict.fromkeys(range(5), rows))).checks[0]
    rates = [row.metrics["val/accuracy"] for row in rows if row.kind == "val"][-3:]
    centres = [(256 * rate + 2) / 260 for rate in rates]
    error = sum(c * (1 - c) / 256 for c in centres) ** 0.5 / 3
    assert (final.high - final.low) / 2 == pytest.approx(2.576 * error * 1.2**0.5)
    assert (final.high + final.low) / 2 == pytest.approx(sum(rates) / 3)


def test_notes_say_what_does_not_decide(band):
    other = manifest(3)
    other["code"] = {"sources_sha256": "other", "git": {"commit": "1", "dirty": True, "diff_sha256": "2"}}
    other["hardware"] = {**other["hardware"], "cores": 64}
    other["attempts"] = [*other["attempts"], {**other["attempts"][0], "attempt": 2, "sources_sha256": "x"}]
    rows = honest_rows(3)
    rows[10].metrics["train/bad_steps"] = 2.0
    verdict = judge(other, rows, band)
    assert verdict.outcome == "reproduced"
    notes = [line for line in verdict.lines if line.startswith("note: ")]
    for words in ("code is not", "uncommitted", "other code than it began", "2 attempts", "hardware",
                  "seed 3 is one", "2 skipped"):  # fmt: skip
        assert any(words in note for note in notes), words
    assert len(notes) == 7


def test_from_run_folders_to_a_verdict(tmp_path):
    runs = [write_run(tmp_path / f"seed-{seed}", seed).path for seed in range(3)]
    write_band(tmp_path / "tiny_arith" / "reference.json", make_band(runs))
    run = write_run(tmp_path / "mine", 100)
    for against in (tmp_path / "tiny_arith", tmp_path / "tiny_arith" / "reference.json"):
        assert verify(run.path, against).outcome == "reproduced"
    unfinished = write_run(tmp_path / "unfinished", 100, last=EVALUATED[-2])
    assert verify(unfinished.path, tmp_path / "tiny_arith").exit_code == 3
    # an attempt that began again from step 40 takes back what came after
    MetricsLog(run, 2, resumed_from=40).close()
    cannot_tell(verify(run.path, tmp_path / "tiny_arith"), "first is 41")


def test_without_a_reference_it_cannot_be_told(tmp_path, monkeypatch):
    run = write_run(tmp_path / "mine", 100)
    monkeypatch.setattr("grpo_recipes.proof.band.measured_folder", lambda: tmp_path)
    cannot_tell(verify(run.path), "no reference of tiny_arith")
    with pytest.raises(UserError, match="no such file"):
        verify(run.path, tmp_path)
    with pytest.raises(UserError, match="no such run"):
        verify(tmp_path / "absent")
