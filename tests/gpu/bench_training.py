"""How near the trainer comes to the rate of a plain matrix product, on one GPU. Not a test; prints and writes figures.

    PYTHONPATH=src:tests python tests/gpu/bench_training.py OUT.json [layers=8] [tokens=16384] [microbatches=4]
        [model=llama|qwen3_moe] [experts=128] [precision=bfloat16] [megatron_cfg keys, e.g. recompute_granularity=full]

The shapes are those of Llama-3.1-8B and Qwen3-30B-A3B with fewer layers; weights are random, sequences are of 200 to 1,600
tokens, packed. TFLOP/s: model FLOPs (recipe/model_flops.py) of the real tokens over the time of the pass.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from grpo_recipes.policy.contract import Batch, LossInputs, LossOutputs
from grpo_recipes.policy.hf.folder import RandomTensors
from grpo_recipes.policy.megatron import trainer
from grpo_recipes.recipe.model_flops import model_shape, sequence_cost
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.recipe.shrink import FAMILIES

# What differs from recipe.shrink.FAMILIES, whose llama has these sizes already.
SIZES = {
    "llama": {},
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
    },
}


class RandomOnDevice(RandomTensors):
    """Drawn on the GPU: a benchmark does not care for the same weights everywhere."""

    def get(self, name, shape):
        if len(shape) == 1:
            return super().get(name, shape)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * self.standard_deviation


def packed(tokens: int, vocab: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(min(int(torch.randint(200, 1601, (), generator=draw)), tokens - sum(lengths)))
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    return Batch(
        token_ids=torch.randint(0, vocab, (tokens,), generator=draw),
        lengths=torch.tensor(lengths),
        mask=mask,
        weights=mask / mask.sum(),
        advantages=torch.randn(tokens, generator=draw),
        sampler_logprobs=torch.zeros(tokens),
    )


def loss(inputs: LossInputs) -> LossOutputs:
    batch = inputs.batch
    value = -(inputs.logprobs * batch.advantages * batch.weights).sum()
    return LossOutputs(value, {"entropy": inputs.entropy.detach().sum()}, {})


def timed(work, repeats: int) -> list[float]:
    work()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def matrix_rate() -> float:
    """TFLOP/s of an 8192^3 bfloat16 product."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    seconds = timed(lambda: [a @ b for _ in range(30)], 3)
    return 30 * 2 * 8192**3 / min(seconds) / 1e12


def main() -> None:
    out, *pairs = sys.argv[1:]
    options = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    name = options.pop("model", "llama")
    config = {**FAMILIES[name], **SIZES[name], "num_hidden_layers": options.pop("layers", 8)}
    if "experts" in options:
        config["num_experts"] = options.pop("experts")
    tokens, count = options.pop("tokens", 16384), options.pop("microbatches", 4)
    precision = options.pop("precision", "bfloat16")
    optimizer = {"lr": 1e-6} | options.pop("optimizer", {})
    rate = matrix_rate()
    trainer.RandomTensors = RandomOnDevice
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        policy = trainer.MegatronPolicy(
            PolicyConfig(
                model_name=folder,
                initial_weights="random",
                train_global_batch_size=64,
                max_total_sequence_length=4096,
                precision=precision,
                generation={"max_new_tokens": 64},
                megatron_cfg={"optimizer": optimizer, **options},
            ),
            temperature=1.0,
            total_optimizer_steps=100,
            model_folder=Path(folder),
        )
    built = torch.cuda.memory_allocated()
    batches = [packed(tokens, config["vocab_size"], seed) for seed in range(count)]
    shape = model_shape(config)
    work = sum(sequence_cost(n, shape) for batch in batches for n in batch.lengths.tolist())
    torch.cuda.reset_peak_memory_stats()
    train = timed(lambda: policy.train(batches, loss), 4)
    train_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward = timed(lambda: policy.logprobs(batches), 4)
    found = {
        **policy.describe(),
        "model": name,
        "layers": config["num_hidden_layers"],
        "options": options | {"optimizer": optimizer},
        "matrix_tflops": rate,
        "train_s": train,
        "train_tflops": work / min(train) / 1e12,
        "train_share": work / min(train) / 1e12 / rate,
        "logprobs_s": forward,
        "logprobs_tflops": work / 3 / min(forward) / 1e12,
        "logprobs_share": work / 3 / min(forward) / 1e12 / rate,
        "built_gib": built / 2**30,
        "train_peak_gib": train_peak / 2**30,
        "logprobs_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    print(json.dumps(found, indent=1))
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
