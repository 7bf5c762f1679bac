"""Which generator a run has, and how it gets the trainer's weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_recipes.cluster.contract import WorkerGroup
from grpo_recipes.cluster.cores import threads_per_worker
from grpo_recipes.engine.policy_group import EmbeddedGenerator
from grpo_recipes.generation.contract import Generator
from grpo_recipes.recipe.schema import Recipe

Refit = Callable[[int], None]  # bring the trainer's weights to the generator, as the given version


@contextmanager
def open_generator(
    recipe: Recipe, workers: WorkerGroup, model_folder: Path, *, on_gpu: bool
) -> Iterator[tuple[Generator, Refit]]:
    """A generator that has the trainer's weights, and what gives it newer ones. Its processes end with the block."""
    if recipe.policy.generation.backend == "megatron":
        embedded = EmbeddedGenerator(workers)
        yield embedded, embedded.refit
        return
    from grpo_recipes.generation.vllm.arguments import engine_setup
    from grpo_recipes.generation.vllm.backend import VllmGenerator

    policy = recipe.policy
    threads = recipe.cluster.cpu_threads or threads_per_worker(1)
    with weights_folder(workers) as folder:
        shutil.copy(model_folder / "config.json", folder)
        setup = engine_setup(policy, folder, on_gpu=on_gpu, threads=threads)
        generator = VllmGenerator(setup, max_positions=policy.max_total_sequence_length)

    def refit(version: int) -> None:
        with weights_folder(workers) as folder:
            generator.load_folder(folder, version)

    with generator:
        yield generator, refit


@contextmanager
def weights_folder(workers: WorkerGroup) -> Iterator[Path]:
    """The trainer's weights as they are now, in a folder that is gone after the block."""
    folder = Path(tempfile.mkdtemp(prefix="refit_"))
    try:
        workers.call("write_weights", folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def check_generator(recipe: Recipe, model_folder: Path, *, on_gpu: bool) -> None:
    """Before anything is started. Raises UserError where the generator cannot run this model here."""
    if recipe.policy.generation.backend == "vllm":
        from grpo_recipes.generation.vllm.arguments import check_vllm

        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        check_vllm(config, on_gpu=on_gpu)
