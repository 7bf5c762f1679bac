"""The whole job by the DTensor trainer on the CPU, beside one by Megatron-Core from the same rollouts."""

import pytest

from job_runs import SHORT, finished, metrics

pytestmark = pytest.mark.timeout(600)

DTENSOR = ("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true")


def test_the_first_steps_are_those_of_megatron(tmp_path):
    """Same seeds, prompts and weights. The first step's rollouts are the same tokens, the sampler being each trainer's
    own; loss, gradient norm and logprobs agree within float32."""
    megatron, dtensor = finished(tmp_path / "megatron", *SHORT), finished(tmp_path / "dtensor", *SHORT, *DTENSOR)
    wanted, found = (metrics(run, "train", 1) for run in (megatron, dtensor))
    for name in ("train/reward", "train/response_length_mean", "train/valid_tokens"):
        assert found[name] == wanted[name]
    assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-5)
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)
    assert found["train/entropy"] == pytest.approx(wanted["train/entropy"], rel=1e-5)
    assert found["train/logprob_diff_max"] < 1e-4
    second = [metrics(run, "train", 2)["train/loss"] for run in (megatron, dtensor)]
    assert second[1] == pytest.approx(second[0], abs=1e-4)
