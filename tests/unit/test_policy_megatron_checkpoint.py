"""The traps of restoring Adam: one `step` shared by all parameters, no `step` before a fresh load, fresh moments
without an error, a scheduler that adds the saved steps to its own."""

import json
import resource
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo_recipes.errors import UserError
from grpo_recipes.policy.megatron.optimizer import distributed_optimizers
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import policy_config, policy_gradient_loss, random_batch, weights_of, write_llama

CFG = {
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
    "scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 2},
}
BATCHES = [random_batch(6, seed=step) for step in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_llama(path)
    return path


def make(folder, **changes):
    return MegatronPolicy(policy_config(folder, megatron_cfg=CFG, **changes), 1.0, 9, folder)


def stranger(folder, seed, **changes):
    """Other weights and other random states than the run that is to be resumed."""
    policy = make(folder, initial_weights="random", init_seed=seed, **changes)
    torch.manual_seed(1000 + seed)
    return policy


def train(policy, batches):
    return [policy.train([batch], policy_gradient_loss) for batch in batches]


def saved(policy, path):
    path.mkdir()
    policy.save(path)
    return path


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used before"])
def test_resumed_twice_equals_uninterrupted_bit_for_bit(precision, used, folder, tmp_path):
    """Covers: fresh Adam silently; loss after restore differs; state that shifts on the second resume."""
    whole = make(folder, precision=precision)
    torch.manual_seed(0)
    wanted = train(whole, BATCHES)
    drawn = torch.rand(2)

    policy = make(folder, precision=precision)
    torch.manual_seed(0)
    found = train(policy, BATCHES[:3])
    for resume in (1, 2):
        path = saved(policy, tmp_path / str(resume))
        policy = stranger(folder, resume, precision=precision)
        if used:
            train(policy, BATCHES[:2])
        policy.load(path)
        found += train(policy, BATCHES[3 * resume : 3 * resume + 3])
    assert found == wanted
    assert all(torch.equal(weights_of(whole)[n], w) for n, w in weights_of(policy).items())
    assert torch.equal(torch.rand(2), drawn)


def test_every_parameter_has_its_own_step(folder, tmp_path):
    """Covers: the second step after a resume is silently wrong."""
    policy = make(folder)
    train(policy, BATCHES[:3])
    again = stranger(folder, 1)
    again.load(saved(policy, tmp_path / "c"))
    for expected in (3.0, 4.0, 5.0):
        (part,) = distributed_optimizers(again.optimizer)
        steps = [state["step"] for state in part.optimizer.state.values()]
        assert len({step.data_ptr() for step in steps}) == len(steps) > 10
        assert {float(step) for step in steps} == {expected}
        train(again, BATCHES[:1])


def test_saved_before_the_first_step(folder, tmp_path):
    policy = make(folder)
    again = stranger(folder, 1)
    train(again, BATCHES[:2])
    again.load(saved(policy, tmp_path / "c"))
    assert train(again, BATCHES[:2]) == train(policy, BATCHES[:2])


def test_random_states_of_the_trainer_come_back(folder, tmp_path):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    policy = make(folder)
    with get_cuda_rng_tracker().fork():
        torch.rand(5)
    path = saved(policy, tmp_path / "c")
    with get_cuda_rng_tracker().fork():
        wanted = torch.rand(3)
    again = stranger(folder, 1)
    again.load(path)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), wanted)


def test_reference_survives_a_resume(folder, tmp_path):
    policy = make(folder)
    train(policy, BATCHES[:2])
    path = saved(policy, tmp_path / "c")
    again = MegatronPolicy(policy_config(folder, megatron_cfg=CFG), 1.0, 9, folder, needs_reference=True)
    (start,) = again.logprobs(BATCHES[:1])
    again.load(path)
    assert torch.equal(again.reference_logprobs(BATCHES[:1])[0], start)
    assert torch.equal(again.logprobs(BATCHES[:1])[0], policy.logprobs(BATCHES[:1])[0])


def rewrite(path, change):
    """Apply `change` to tensors and header of a saved file."""
    file = path / "rank-00000.safetensors"
    with safe_open(file, framework="pt") as handle:
        header = json.loads(handle.metadata()["state"])
    tensors = load_file(file)
    change(tensors, header)
    save_file(tensors, file, metadata={"state": json.dumps(header)})


def drop_moment(tensors, header):
    del tensors["exp_avg_sq/3"]


def drop_parameter(tensors, header):
    for piece in header["shards"]:
        if piece["part"]["hf"] == ["model.norm.weight"]:
            piece["part"]["hf"] = ["another"]


def shorten_a_tensor(tensors, header):
    tensors["param/3"] = tensors["param/3"][1:].clone()


def drop_random_state(tensors, header):
    del tensors["rng/cpu"]


def drop_a_piece(tensors, header):
    header["shards"][0]["stop"] -= 1


def hold_a_piece_twice(tensors, header):
    count = len(header["shards"])
    header["shards"].append(header["shards"][0])
    for state in ("param", "exp_avg", "exp_avg_sq"):
        tensors[f"{state}/{count}"] = tensors[f"{state}/0"].clone()


def freeze(tensors, header):
    header["shards"][0]["trained"] = False


def other_format(tensors, header):
    header["format"] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_moment, "lacks exp_avg_sq/3"),
        (drop_parameter, r"nothing for model\.norm\.weight"),
        (drop_random_state, "lacks rng/cpu"),
        (drop_a_piece, "every element of param of .* exactly once"),
        (hold_a_piece_twice, "every element of param of .* exactly once"),
        (shorten_a_tensor, "exactly once"),
        (freeze, "was frozen when the checkpoint was written"),
        (other_format, "format 0, this version reads format 2"),
    ],
)
def test_missing_state_is_an_error_and_changes_nothing(change, message, folder, tmp_path):
    """Covers: fresh Adam silently."""
    policy = make(folder)
    train(policy, BATCHES[:2])
    path = saved(policy, tmp_path / "c")
    rewrite(path, change)
    train(policy, BATCHES[2:3])
    before = weights_of(policy)
    with pytest.raises(UserError, match=message):
        policy.load(path)
    assert all(torch.equal(before[n], w) for n, w in weights_of(policy).items())


def test_a_truncated_file_is_an_error(folder, tmp_path):
    policy = make(folder)
    path = saved(policy, tmp_path / "c")
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        policy.load(path)
    file.unlink()
    with pytest.raises(UserError, match="missing"):
        policy.load(path)


def test_a_full_disk_is_an_operating_system_error(folder, tmp_path):
    """safetensors has an exception of its own, which the checkpoint store would not take for a full disk."""
    policy = make(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*rank-00000\.safetensors"):
            policy.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
