"""`nemo-run diagnose` names a cause that was planted in stored rollouts.

What the sampler "said" is computed here with transformers, not with the code under test.
"""

import numpy as np
import pytest
import torch

from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import Batch
from grpo_recipes.proof.diagnose import diagnose, rerouted_tokens
from grpo_recipes.proof.diagnose_causes import Part, largest, of_change, of_coarser, of_rounding, of_routing
from grpo_recipes.proof.diagnose_recompute import Recomputed
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.rollout_store import StoredRollouts, write_stored
from policy_models import policy_gradient_loss, write_model

pytestmark = pytest.mark.timeout(600)
TEMPERATURE, SAMPLES, PROMPT, RESPONSE, VOCAB = 0.7, 24, 5, 4, 12
STEP, VERSION = 3, 4  # of the rollouts: trained on after two steps, or four optimizer steps


def tokens():
    return torch.randint(0, VOCAB, (SAMPLES, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0))


def batch():
    mask = torch.tensor([False] * PROMPT + [True] * RESPONSE).repeat(SAMPLES)
    values = torch.randn(len(mask), generator=torch.Generator().manual_seed(1)) * mask
    return Batch(
        tokens().flatten(),
        torch.full((SAMPLES,), PROMPT + RESPONSE),
        mask,
        mask / mask.sum(),
        values,
        torch.zeros(len(mask)),
    )


def by_reference(folder, *, temperature=TEMPERATURE, dtype=torch.float32, softmax=torch.float32):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(tokens()).logits.to(softmax)
    logprobs = (logits / temperature).log_softmax(-1)[:, :-1].gather(2, tokens()[:, 1:, None])[..., 0]
    return logprobs[:, PROMPT - 1 :].flatten().float().numpy()


def store(run, logprobs, *, version=VERSION, drawn_by=None):
    drawn = SAMPLES * RESPONSE
    stored = StoredRollouts(
        step=STEP,
        weight_version=version,
        recipe_digest="",
        prompt_ids=tokens()[:, :PROMPT].flatten().numpy().astype(np.int32),
        prompt_lengths=np.full(SAMPLES, PROMPT, np.int32),
        response_ids=tokens()[:, PROMPT:].flatten().numpy().astype(np.int32),
        response_lengths=np.full(SAMPLES, RESPONSE, np.int32),
        logprobs=logprobs,
        weight_versions=np.full(drawn, version if drawn_by is None else drawn_by, np.int32),
        example=np.arange(SAMPLES, dtype=np.int32),
        group=np.arange(SAMPLES, dtype=np.int64),
        sample=np.zeros(SAMPLES, np.int32),
        seed=np.arange(SAMPLES, dtype=np.int64),
        reward=np.zeros(SAMPLES),
        valid=np.ones(SAMPLES, bool),
        finish_reason=np.zeros(SAMPLES, np.uint8),
    )
    write_stored(run, STEP, stored)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with checkpoints of versions 2 and 4, and the models in them as Hugging Face folders."""
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy
    from grpo_recipes.recipe.model_folder import model_path

    run = create_run(tmp_path_factory.mktemp("run") / "run")
    resolved = resolve("tiny_arith", [f"policy.generation.temperature={TEMPERATURE}"])
    run.recipe_path.write_text(resolved.to_yaml())
    source = model_path(resolved.recipe.policy.model_name)
    policy = MegatronPolicy(resolved.recipe.policy, TEMPERATURE, 20, source)
    checkpoints = CheckpointStore(run.checkpoints_dir, keep_last=9, keep_top_k=0, higher_is_better=True)
    models = {0: source}
    for version in range(1, VERSION + 1):
        policy.train([batch()], policy_gradient_loss)
        if version % 2 == 0:
            checkpoints.save(version // 2, {"weight_version": version}, None, policy.save)
            models[version] = tmp_path_factory.mktemp("model") / str(version)
            models[version].mkdir()
            policy.export(models[version])
    policy.close()
    return run, models


def test_nothing_is_wrong(trained):
    """The sampler is another program of the same precision: what is left is rounding, and very little of it."""
    run, models = trained
    store(run, by_reference(models[VERSION]))
    found = diagnose(run.path, STEP)
    assert found.gap < 1e-5
    assert found.largest.cause in ("precision", "kernels")
    assert (found.responses, found.tokens) == (SAMPLES, SAMPLES * RESPONSE)


def test_logprobs_without_temperature(trained):
    run, models = trained
    store(run, by_reference(models[VERSION], temperature=1.0))
    found = diagnose(run.path)
    assert (found.largest.cause, found.largest.what) == ("sampling transform", "no temperature")
    assert found.largest.explains > 0.99
    assert any(line.startswith("largest part: sampling transform") for line in found.lines())


@pytest.mark.parametrize(("drawn_with", "name"), [(2, "step_000001"), (0, "initial weights")])
def test_stale_weights(drawn_with, name, trained):
    """Covers: a refit that did not arrive, so that rollouts of older weights say that they are of the newest."""
    run, models = trained
    store(run, by_reference(models[drawn_with]))
    found = diagnose(run.path, STEP)
    assert (found.largest.cause, found.largest.what) == ("stale weights", f"weights {drawn_with} ({name})")
    assert found.largest.explains > 0.99


def test_tokens_that_say_that_they_are_of_older_weights(trained):
    run, models = trained
    half = np.arange(SAMPLES * RESPONSE) % RESPONSE < 2  # each response begun by 2, and continued after a refit
    store(run, np.where(half, by_reference(models[2]), by_reference(models[4])), drawn_by=np.where(half, 2, 4))
    found = diagnose(run.path, STEP).largest
    assert (found.cause, found.what) == ("stale weights", "the weights each token was drawn by")
    assert found.explains > 0.99


@pytest.mark.parametrize("softmax", [torch.float32, torch.bfloat16])
def test_rollouts_in_bfloat16(softmax, trained):
    run, models = trained
    store(run, by_reference(models[VERSION], dtype=torch.bfloat16, softmax=softmax))
    found = diagnose(run.path, STEP)
    assert found.largest.cause == "precision" and "bfloat16" in found.largest.what
    assert found.largest.explains > 0.5


def test_rotary_positions_of_the_trainer_that_are_wrong(trained, monkeypatch):
    """A mistake in the trainer's own kernels: what transformers compute is what the sampler says."""
    from grpo_recipes.policy.attention import Rotary

    run, models = trained
    store(run, by_reference(models[VERSION]))
    at = Rotary.at
    monkeypatch.setattr(Rotary, "at", lambda self, positions, dtype: at(self, 2 * positions, dtype))
    found = diagnose(run.path, STEP).largest
    assert found.cause == "kernels" and found.what.startswith("transformers' kernels")
    assert found.explains > 0.99


def test_weights_that_no_checkpoint_holds(trained):
    run, _ = trained
    store(run, np.zeros(SAMPLES * RESPONSE, np.float32), version=3)
    with pytest.raises(UserError, match=r"version 3.*\n.*0 \(initial weights\), 2 \(step_000001\), 4 \(step_000002\)"):
        diagnose(run.path, STEP)


def test_a_step_that_was_not_stored(trained):
    with pytest.raises(UserError, match="no stored rollouts of step 77"):
        diagnose(trained[0].path, 77)


def test_a_mixture_of_experts(tmp_path):
    """Rounding sends tokens to other experts: the share is told, and it is the only model that has this part."""
    write_model("qwen3_moe", tmp_path / "model")
    run = create_run(tmp_path / "run")
    overrides = [f"policy.model_name={tmp_path / 'model'}", f"policy.generation.temperature={TEMPERATURE}"]
    run.recipe_path.write_text(resolve("tiny_arith", overrides).to_yaml())
    store(run, by_reference(tmp_path / "model", dtype=torch.bfloat16), version=0)
    found = diagnose(run.path, STEP)
    assert found.weights == "initial weights"
    assert found.largest.cause in ("precision", "routing")
    [rough, fine] = sorted(
        (p.what for p in found.parts if p.cause == "routing"), key=lambda what: "float32 against" in what
    )
    assert rough.startswith("bfloat16 against float64: experts of ") and " 0.0%" not in rough
    assert fine == "float32 against float64: experts of 0.0% of tokens differ"


def test_experts_chosen_in_bfloat16(tmp_path):
    """A sampler whose routers round, and nothing else: float32 throughout, with the choices of a bfloat16 model."""
    from transformers import AutoModelForCausalLM

    write_model("qwen3_moe", tmp_path / "model")
    run = create_run(tmp_path / "run")
    overrides = [f"policy.model_name={tmp_path / 'model'}", f"policy.generation.temperature={TEMPERATURE}"]
    run.recipe_path.write_text(resolve("tiny_arith", overrides).to_yaml())

    def with_routers(dtype, hook):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype, experts_implementation="eager")
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(hook)
        with torch.no_grad():
            return [model(ids[None]).logits[0].float() for ids in tokens()]

    chosen = []
    with_routers(torch.bfloat16, lambda module, inputs, output: chosen.append(output[2]))
    left = iter(chosen)

    def choose_as_before(module, inputs, output):
        experts = next(left)
        scores = output[0].softmax(-1).gather(1, experts)
        return output[0], scores / scores.sum(-1, keepdim=True), experts

    logits = torch.stack(with_routers(torch.float32, choose_as_before))
    logprobs = (logits / TEMPERATURE).log_softmax(-1)[:, :-1].gather(2, tokens()[:, 1:, None])[..., 0]
    store(run, logprobs[:, PROMPT - 1 :].flatten().numpy(), version=0)
    found = diagnose(run.path, STEP)
    assert found.largest.cause == "routing" and found.largest.what.startswith("bfloat16")


# -- the parts ---------------------------------------------------------------------------------------------------------
SAMPLER, BASE = np.array([-1.0, -2.0, -3.0, -4.0]), np.array([-1.4, -2.0, -2.8, -4.2])  # gap (0.4 + 0 + 0.2 + 0.2) / 4


def test_a_change_explains_what_it_takes_off_the_gap():
    part = of_change("kernels", "x", SAMPLER, BASE, np.array([-1.0, -2.0, -2.8, -4.2]))
    assert (part.left, part.explains) == pytest.approx((0.1, 0.5))
    assert of_change("kernels", "x", SAMPLER, BASE, BASE - 1).explains == 0  # made it worse
    assert of_change("kernels", "x", SAMPLER, SAMPLER, BASE).explains == 0  # there was no gap


def test_a_change_against_other_kernels_counts_only_what_it_adds():
    part = of_change("precision", "x", SAMPLER, BASE, SAMPLER, before=np.array([-1.0, -2.0, -2.8, -4.2]))
    assert (part.left, part.explains) == pytest.approx((0.0, 0.5))


def test_rounding_goes_by_its_size():
    rng = np.random.default_rng(0)
    exact = -rng.random(100_000)
    one, other = (exact + 1e-3 * rng.standard_normal(len(exact)) for _ in range(2))
    assert of_rounding("x", one, other, exact).explains == pytest.approx(1.0, abs=0.01)
    assert of_rounding("x", one + 0.1, other, exact).explains < 0.02


def test_fewer_bits_go_by_their_size():
    assert of_coarser("x", SAMPLER, BASE, rounding=0.1).explains == pytest.approx(0.5)
    assert of_coarser("x", SAMPLER, BASE, rounding=0.4).explains == pytest.approx(0.5)
    assert of_coarser("x", SAMPLER, SAMPLER, rounding=0.4).explains == 0


def test_routing_is_the_excess_at_tokens_of_other_experts():
    rerouted = np.array([True, False, False, False])  # gaps 0.4 | 0, 0.2, 0.2: excess 0.4 - 0.1333 of 0.8
    assert of_routing("x", SAMPLER, BASE, rerouted).explains == pytest.approx((0.4 - 0.4 / 3) / 0.8)
    assert of_routing("x", SAMPLER, BASE, np.zeros(4, bool)).explains == 0


def test_experts_that_differ_in_any_layer():
    exact = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    rounded = np.array([[[0, 1], [2, 3]], [[0, 1], [1, 3]]])
    none = np.zeros(2)
    assert rerouted_tokens(Recomputed(none, exact), Recomputed(none, rounded)).tolist() == [False, True]
    assert rerouted_tokens(Recomputed(none, None), Recomputed(none, None)) is None


def test_what_routing_makes_of_rounding_is_not_counted_twice():
    parts = [Part("precision", "p", 0.0, 0.9), Part("routing", "r", 0.0, 0.6), Part("kernels", "k", 0.0, 0.1)]
    assert largest(parts).cause == "routing"
    assert largest([Part("precision", "p", 0.0, 0.9), Part("routing", "r", 0.0, 0.2)]).cause == "precision"
    assert largest([Part("kernels", "k", 0.0, 0.2)]) is None
