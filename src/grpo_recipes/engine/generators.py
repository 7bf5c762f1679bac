"""Which generator a run has, and how it gets the trainer's weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from grpo_recipes.cluster.contract import WorkerGroup
from grpo_recipes.cluster.cores import threads_per_worker
from grpo_recipes.engine.policy_group import EmbeddedGenerator
from grpo_recipes.engine.refit import LOOPBACK, EmbeddedRefit, EngineRefit, RefitStats, transport_of, weights_folder
from grpo_recipes.generation.contract import Generator
from grpo_recipes.generation.router import Router
from grpo_recipes.recipe.model_folder import read_json
from grpo_recipes.recipe.schema import Recipe

Refit = Callable[[int], RefitStats]  # bring the trainer's weights to the generator, as the given version


@contextmanager
def open_generator(
    recipe: Recipe, workers: WorkerGroup, model_folder: Path, *, on_gpu: bool
) -> Iterator[tuple[Generator, Refit]]:
    """A generator that has the trainer's weights, and what gives it newer ones. Its processes end with the block."""
    if recipe.policy.generation.backend == "megatron":
        yield EmbeddedGenerator(workers), EmbeddedRefit(workers, recipe.policy.generation.refit.certify)
        return
    from grpo_recipes.generation.vllm.arguments import engine_setup
    from grpo_recipes.generation.vllm.backend import VllmGenerator

    policy, count = recipe.policy, recipe.policy.generation.num_engines
    threads = recipe.cluster.cpu_threads or threads_per_worker(count)

    def start(engines: int) -> list[VllmGenerator]:
        """By the weights that the trainer has now."""
        with weights_folder(workers) as (folder, _), ThreadPoolExecutor(engines) as pool:
            shutil.copy(model_folder / "config.json", folder)
            setup = engine_setup(policy, folder, on_gpu=on_gpu, threads=threads)
            jobs = [
                pool.submit(VllmGenerator, setup, max_positions=policy.max_total_sequence_length)
                for _ in range(engines)
            ]
            wait(jobs)
            try:
                return [job.result() for job in jobs]
            except Exception:
                for job in jobs:
                    if not job.exception():
                        job.result().close()
                raise

    router = Router(
        start,
        count,
        # The trainer may be ahead of the last refit: what the new engine draws is by what it was given.
        catch_up=lambda engine: refit.catch_up(workers.call("optimizer_steps")[0], engine),
        max_restarts=policy.generation.max_engine_restarts,
        warn=lambda message: print(f"warning: {message}", file=sys.stderr, flush=True),
    )
    refit = EngineRefit(
        workers,
        lambda: router.engines,
        transport=transport_of(recipe),
        certify=policy.generation.refit.certify,
        precision=policy.precision,
        vocab_size=read_json(model_folder / "config.json")["vocab_size"],
        longest=policy.max_total_sequence_length,
        host=LOOPBACK if recipe.cluster.num_nodes == 1 else "",
    )

    def refit_all(version: int) -> RefitStats:
        router.heal()
        return refit(version)

    with router:
        yield router, refit_all


def check_generator(recipe: Recipe, model_folder: Path, *, on_gpu: bool) -> None:
    """Before anything is started. Raises UserError where the generator cannot run this model here."""
    if recipe.policy.generation.backend == "vllm":
        from grpo_recipes.generation.vllm.arguments import check_vllm

        check_vllm(read_json(model_folder / "config.json"), on_gpu=on_gpu)
