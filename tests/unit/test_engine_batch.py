import pytest
import torch

from grpo_recipes.engine.batch import Sample, loss_weights, make_batch, split_evenly

SAMPLES = [
    Sample((1, 2), torch.tensor([3, 4, 5]), torch.tensor([-0.1, -0.2, -0.3]), 1.0),
    Sample((6,), torch.tensor([7]), torch.tensor([-0.4]), -2.0),
    Sample((8, 9, 10), torch.tensor([11, 12]), torch.tensor([-0.5, -0.6]), 0.5),
]


def test_make_batch_literal():
    batch = make_batch(SAMPLES, [[0, 1], [2]], token_level=True)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert batch.lengths.tolist() == [5, 2, 5]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 12]
    assert batch.mask.int().tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    torch.testing.assert_close(batch.weights, torch.tensor([0, 0, 0.25, 0.25, 0.25, 0, 0.25, 0, 0, 0, 0.5, 0.5]))
    torch.testing.assert_close(batch.advantages, torch.tensor([0, 0, 1.0, 1, 1, 0, -2, 0, 0, 0, 0.5, 0.5]))
    torch.testing.assert_close(
        batch.sampler_logprobs, torch.tensor([0, 0, -0.1, -0.2, -0.3, 0, -0.4, 0, 0, 0, -0.5, -0.6])
    )


def test_sequence_level_weights_literal():
    batch = make_batch(SAMPLES, [[0, 1], [2]], token_level=False)
    torch.testing.assert_close(batch.weights, torch.tensor([0, 0, 1 / 6, 1 / 6, 1 / 6, 0, 0.5, 0, 0, 0, 0.5, 0.5]))


def test_select_cuts_every_field():
    batch = make_batch(SAMPLES, [[0, 1, 2]], token_level=True).select([2, 1])
    assert batch.token_ids.tolist() == [8, 9, 10, 11, 12, 6, 7]
    assert batch.lengths.tolist() == [5, 2]
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, -2]
    assert batch.old_logprobs is None


@pytest.mark.parametrize("token_level", [True, False])
def test_weights_sum_to_one_in_each_optimizer_step(token_level):
    """Covers: loss averaged per microbatch; ranks with fewer tokens counting more. Weights know the whole step."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 50, (40,), generator=g)
    mask = torch.rand(int(lengths.sum()), generator=g) < 0.6
    step = torch.arange(40) % 3
    weights = loss_weights(mask, lengths, step, token_level=token_level)
    step_T = torch.repeat_interleave(step, lengths)
    for s in range(3):
        assert weights[step_T == s].sum().item() == pytest.approx(1, abs=1e-6)
    assert (weights[~mask] == 0).all()


def test_split_evenly():
    assert [list(r) for r in split_evenly(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(r) for r in split_evenly(2, 5)] == [1, 1]
    assert split_evenly(0, 4) == []
