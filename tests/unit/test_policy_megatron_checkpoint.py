"""The traps of restoring Adam: one `step` shared by all parameters, no `step` before a fresh load, fresh moments
without an error, a scheduler that adds the saved steps to its own."""

import json
import resource
import signal
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo_recipes.errors import UserError
from grpo_recipes.policy.megatron import checkpoint
from grpo_recipes.policy.megatron.optimizer import distributed_optimizers
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from grpo_recipes.runs.files import folder_sha256
from policy_models import policy_config, policy_gradient_loss, random_batch, weights_of, write_llama, write_model

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


def empty(path):
    path.mkdir()
    return path


def saved(policy, path):
    policy.save(empty(path))
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


def from_a_gpu(tensors, state):
    tensors["rng/cuda"] = torch.zeros(16, dtype=torch.uint8)


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
        (from_a_gpu, "written on a GPU, and this is a CPU"),
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


@pytest.fixture
def full_disk():
    """The kernel refuses to write more than 4 KiB to a file, as it does on a full disk."""

    @contextmanager
    def limited():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limited()


def test_a_full_disk_is_an_operating_system_error(folder, tmp_path, full_disk):
    policy = make(folder)
    with full_disk, pytest.raises(OSError, match=r"File too large.*rank-00000\.safetensors"):
        policy.save(tmp_path)


def test_steps_taken_while_a_save_goes_on_are_not_in_it(folder, tmp_path, monkeypatch):
    policy = make(folder)
    train(policy, BATCHES[:2])
    wanted = policy.save(empty(tmp_path / "foreground"))
    may_write = threading.Event()
    write = checkpoint.Contents.write
    monkeypatch.setattr(checkpoint.Contents, "write", lambda *args: may_write.wait(60) and write(*args))
    policy.start_save(empty(tmp_path / "background"))
    assert policy.finish_save(wait=False) is None
    train(policy, BATCHES[2:5])
    may_write.set()
    assert policy.finish_save(wait=True) == wanted == folder_sha256(tmp_path / "background")


def test_host_memory_of_a_background_save_is_used_again(folder, tmp_path):
    policy = make(folder)
    assert policy.finish_save(wait=True) is None
    blocks = set()
    for step in range(3):
        train(policy, BATCHES[step : step + 1])
        policy.start_save(empty(tmp_path / str(step)))
        blocks.add(policy._checkpoints._host._block.data_ptr())
    assert policy.finish_save(wait=True) == folder_sha256(tmp_path / "2")
    assert len(blocks) == 1
    elements = sum(weight.numel() for weight in weights_of(policy).values())
    assert 12 * elements <= len(policy._checkpoints._host._block) < 13 * elements + 100_000


def test_a_full_disk_in_the_background_is_raised_when_it_is_asked_for(folder, tmp_path, full_disk):
    policy = make(folder)
    with full_disk:
        policy.start_save(tmp_path)
        with pytest.raises(OSError, match=r"File too large.*rank-00000\.safetensors"):
            policy.finish_save(wait=True)


def test_frozen_parameters_come_back(tmp_path):
    """Their weights are nowhere in the optimizer."""
    write_model("qwen3_moe", tmp_path / "model")
    cfg = CFG | {"freeze_moe_router": True}
    policies = [MegatronPolicy(policy_config(tmp_path / "model", megatron_cfg=cfg), 1.0, 9, tmp_path / "model")]
    changes = {"megatron_cfg": cfg, "initial_weights": "random", "init_seed": 3}
    policies.append(MegatronPolicy(policy_config(tmp_path / "model", **changes), 1.0, 9, tmp_path / "model"))
    train(policies[0], BATCHES[:2])
    assert not torch.equal(*(weights_of(policy)["model.layers.1.mlp.gate.weight"] for policy in policies))
    policies[1].load(saved(policies[0], tmp_path / "c"))
    wanted = weights_of(policies[0])
    assert all(torch.equal(wanted[name], weight) for name, weight in weights_of(policies[1]).items())
    assert train(policies[0], BATCHES[2:4]) == train(policies[1], BATCHES[2:4])
    thawed = MegatronPolicy(policy_config(tmp_path / "model", megatron_cfg=CFG), 1.0, 9, tmp_path / "model")
    with pytest.raises(UserError, match=r"gate\.weight was frozen"):
        thawed.load(tmp_path / "c")


def test_buffers_come_back(tmp_path):
    """The bias by which a router is balanced without a loss moves with every step, and has no gradient."""
    write_model("qwen3_moe", tmp_path / "model")
    cfg = CFG | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    policy, again = (
        MegatronPolicy(policy_config(tmp_path / "model", megatron_cfg=cfg), 1.0, 9, tmp_path / "model")
        for _ in range(2)
    )
    train(policy, BATCHES[:3])
    bias = policy.built.chunks[0].decoder.layers[1].mlp.router.expert_bias
    assert bias.any()
    path = saved(policy, tmp_path / "c")
    again.load(path)
    assert torch.equal(again.built.chunks[0].decoder.layers[1].mlp.router.expert_bias, bias)
    assert train(policy, BATCHES[3:5]) == train(again, BATCHES[3:5])
    rewrite(path, lambda tensors, header: tensors.pop("buffer/decoder.layers.1.mlp.router.expert_bias"))
    with pytest.raises(UserError, match=r"lacks buffer/decoder\.layers\.1\.mlp\.router\.expert_bias"):
        again.load(path)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (
            "llama",
            {"vocab_size": 23},
            r"model\.embed_tokens\.weight is 17 x 48 in the checkpoint, 23 x 48 in the model",
        ),
        ("llama", {"num_hidden_layers": 3}, r"it lacks model\.layers\.2\.\S+ and 8 more tensors"),
        ("llama", {"tie_word_embeddings": True}, r"it has lm_head\.weight"),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}, "its attention has"),
        ("qwen3", {}, r"it lacks model\.layers\.0\.self_attn\.k_norm\.weight and 3 more"),
    ],
)
def test_another_model_is_an_error_and_changes_nothing(family, config, message, folder, tmp_path):
    policy = make(folder)
    train(policy, BATCHES[:1])
    path = saved(policy, tmp_path / "c")
    write_model(family, tmp_path / "model", **config)
    other = make(tmp_path / "model")
    train(other, BATCHES[:1])
    before = weights_of(other)
    with pytest.raises(UserError, match=f"a checkpoint of another model: {message}"):
        other.load(path)
    assert all(torch.equal(before[n], w) for n, w in weights_of(other).items())
