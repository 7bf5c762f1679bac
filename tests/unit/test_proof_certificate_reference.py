"""The reference of a certificate is what it says: names, clips, denominators and an optimizer written out once more."""

import math

import pytest
import torch
from safetensors.torch import load_file

from grpo_recipes.proof.certificate.reference import (
    OPTIMIZER,
    Reference,
    as_saved,
    logprobs_of,
    run_reference,
    write_checkpoint,
)
from grpo_recipes.recipe.shrink import FAMILIES, shrink


def tiny(family: str) -> dict:
    return shrink(FAMILIES[family], layers=2, vocab_size=29)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = write_checkpoint(tiny("llama"), folder, torch.float32)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    reference = run_reference(model, folder / "reference")
    return model, start, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_the_saved_model(family: str, tmp_path) -> None:
    """transformers holds the experts of a layer in one tensor, which no checkpoint does."""
    model = write_checkpoint(tiny(family), tmp_path, torch.bfloat16)
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    found = as_saved(model, {name: p.detach() for name, p in model.named_parameters()})
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    if family in ("qwen3_moe", "mixtral"):
        assert sum(".experts." in name for name in saved) == 2 * 8 * 3


def test_nothing_random_is_left_at_its_default(llama) -> None:
    _, start, _ = llama
    for name, tensor in start.items():
        assert tensor.std() > 0.1 or tensor.ndim > 1, name
        assert tensor.unique().numel() > tensor.numel() // 2, name


def test_ratios_lie_on_all_sides_of_the_clips_and_away_from_them(llama) -> None:
    _, _, reference = llama
    batch = reference.batches[0]
    ratios = (reference.logprobs - batch.old_logprobs.double()).exp()[batch.mask]
    borders = torch.tensor([0.8, 1.28, 3.0], dtype=torch.float64)
    assert (ratios[:, None] - borders).abs().min() > 0.1
    assert [int((ratios > border).sum()) > 0 for border in borders] == [True] * 3
    assert (ratios < 0.8).any()
    assert all(0 < step.clipped < step.tokens for step in reference.steps)


def test_weights_are_shares_of_the_global_count(llama) -> None:
    _, _, reference = llama
    for batch, step in zip(reference.batches, reference.steps, strict=True):
        assert step.tokens == float(batch.mask.sum())
        assert batch.weights[batch.mask].tolist() == pytest.approx([1 / step.tokens] * int(step.tokens))
    assert [batch.lengths.tolist()[0] for batch in reference.batches] == [5, 17, 2]


def test_the_first_step_is_adam_with_clipping_and_decay_of_matrices_only(llama) -> None:
    """After one step of Adam from zero, the update is lr g / (|g| + eps), whatever the betas."""
    model, start, reference = llama
    gradients = {k.removeprefix("gradient/"): t for k, t in load_file(reference.tensors).items() if k[0] == "g"}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert norm == pytest.approx(reference.steps[0].grad_norm, rel=1e-9)
    assert norm > OPTIMIZER.max_grad_norm, "clipping is active"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            g = gradients[name] * OPTIMIZER.max_grad_norm / norm
            decay = OPTIMIZER.weight_decay if start[name].ndim > 1 else 0.0
            parameter.copy_(start[name] * (1 - OPTIMIZER.lr * decay) - OPTIMIZER.lr * g / (g.abs() + OPTIMIZER.eps))
    batch = reference.batches[1]
    logprobs, _ = logprobs_of(model, batch)
    noise = (batch.old_logprobs.double() - logprobs)[batch.mask].tolist()
    allowed = (-1.2, -0.5, -0.1, 0.0, 0.1, 0.5)  # what lies between old and current logprobs
    assert max(min(abs(found - wanted) for wanted in allowed) for found in noise) < 1e-5


def test_every_weight_moves(llama) -> None:
    _, _, reference = llama
    assert isinstance(reference, Reference)
    assert min(reference.changes.values()) > 1e-4
