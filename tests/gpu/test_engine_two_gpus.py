"""The whole job on two GPUs of one machine, NCCL between its processes, against the same job on one."""

import json

import pytest
import torch

from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.rollouts import read_rollouts
from job_runs import CFG, SHORT, finished, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS = (*SHORT, "grpo.max_num_steps=3")
TP2 = ("cluster.gpus_per_node=2", f"{CFG}.tensor_model_parallel_size=2")
DP2 = ("cluster.gpus_per_node=2",)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("run") / "one", *STEPS, "cluster.gpus_per_node=1")


@pytest.mark.parametrize(("layout", "sampler_weights"), [(TP2, "copy"), (DP2, "shared")], ids=["TP2", "DP2"])
def test_the_first_step_is_that_of_one_gpu(one_gpu, tmp_path, layout, sampler_weights):
    """In float32, in which a draw hardly ever falls between two roundings."""
    run = finished(tmp_path / "run", *STEPS, *layout)
    drawn, alone = ([r.token_ids for r in read_rollouts(RunFolder(path), 1)] for path in (run, one_gpu))
    assert sum(a == b for a, b in zip(drawn, alone, strict=True)) >= 127
    found, expected = metrics(run, "train", 1), metrics(one_gpu, "train", 1)
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.02)
    assert all(metrics(run, "train", step)["train/logprob_diff_max"] < 1e-3 for step in (1, 2, 3))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["backends"]["sampler_weights"] == sampler_weights
    assert len(manifest["hardware"]["gpus"]) == 2


def test_half_precision_runs_on_both(tmp_path):
    """Trainer and sampler agree as far as bfloat16 has digits."""
    run = finished(tmp_path / "run", *STEPS, *TP2, f"{CFG}.sequence_parallel=true", "policy.precision=bfloat16")
    assert all(metrics(run, "train", step)["train/token_mult_prob_error"] < 1.05 for step in (1, 2, 3))
