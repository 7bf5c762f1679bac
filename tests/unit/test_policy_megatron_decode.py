import pytest
import torch

from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import (
    LLAMA3_ROPE,
    VOCAB,
    policy_config,
    policy_gradient_loss,
    random_batch,
    write_llama,
    write_model,
)


def full_logits(model, rows):
    with torch.no_grad():
        return torch.stack([model(row[None]).logits[0, -1] for row in rows]).double()


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"rope_parameters": None}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
    ],
    ids=str,
)
def test_every_step_equals_a_full_forward_of_transformers(family, shape, tmp_path):
    model = write_model(family, tmp_path, **shape).double()
    policy = MegatronPolicy(policy_config(tmp_path), 1.0, 9, tmp_path)
    torch.manual_seed(0)
    lengths = torch.tensor([9, 2, 1, 6, 9])
    rows = [torch.randint(0, VOCAB, (n,)) for n in lengths]
    padded = torch.stack([torch.nn.functional.pad(row, (9 - len(row), 0), value=3) for row in rows])
    decoder = policy.decoder(max_batch_size=5, max_sequence_length=30)
    policy.model[0].train()
    logits = decoder.prefill(padded, 9 - lengths)
    for step in range(21):
        assert logits.shape == (len(rows), VOCAB)
        torch.testing.assert_close(logits.double(), full_logits(model, rows), atol=1e-5, rtol=1e-5)
        if step in (3, 8):  # finished rows leave, the others change places
            keep = torch.tensor([3, 0, 4]) if step == 3 else torch.tensor([1])
            decoder.select(keep)
            rows = [rows[i] for i in keep]
        drawn = torch.randint(0, VOCAB, (len(rows),))
        logits = decoder.step(drawn)
        rows = [torch.cat((row, token[None])) for row, token in zip(rows, drawn, strict=True)]
    assert policy.model[0].training
    with pytest.raises(ValueError, match="full"):
        decoder.step(drawn)


def test_sees_the_weights_as_training_changes_them(tmp_path):
    """Covers: stale prefix cache after refit."""
    write_llama(tmp_path)
    policy = MegatronPolicy(policy_config(tmp_path), 1.0, 9, tmp_path)
    decoder = policy.decoder(max_batch_size=2, max_sequence_length=8)
    prompt, pads = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 1])
    before = decoder.prefill(prompt, pads)
    policy.train([random_batch(4)], policy_gradient_loss)
    after = decoder.prefill(prompt, pads)
    assert not torch.allclose(before, after, atol=1e-3)
    new = policy.decoder(max_batch_size=2, max_sequence_length=8)
    assert torch.equal(after, new.prefill(prompt, pads))


def test_too_many_rows_or_tokens(tmp_path):
    write_llama(tmp_path)
    decoder = MegatronPolicy(policy_config(tmp_path), 1.0, 9, tmp_path).decoder(max_batch_size=2, max_sequence_length=4)
    with pytest.raises(ValueError, match="exceed 2 x 4"):
        decoder.prefill(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
