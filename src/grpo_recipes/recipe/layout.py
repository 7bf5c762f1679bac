"""Parallel layouts that cannot work: against the cluster, against one another, and against a model's shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from grpo_recipes.recipe.megatron import given_fields
from grpo_recipes.recipe.model_flops import ModelShape
from grpo_recipes.recipe.problems import Problem
from grpo_recipes.recipe.schema import ClusterConfig, MegatronConfig, Recipe

_CFG = "policy.megatron_cfg"
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def devices(cluster: ClusterConfig) -> int:
    """Processes that train."""
    return cluster.num_nodes * (cluster.gpus_per_node or cluster.cpu_processes or 1)


def parallel_problems(recipe: Recipe) -> Iterator[Problem]:
    """Parallel sizes against each other and against the cluster.

    Data parallel size is what is left: devices / (tensor x pipeline x context). Expert parallel size divides
    data x context x tensor / expert_tensor.
    """
    cfg, cluster = recipe.policy.megatron_cfg, recipe.cluster
    if cluster.gpus_per_node and cluster.cpu_processes:
        yield Problem("cluster.cpu_processes", f"and gpus_per_node {cluster.gpus_per_node} are both set", "set one")
    if cfg.sequence_parallel and cfg.tensor_model_parallel_size == 1:
        yield Problem(
            f"{_CFG}.sequence_parallel",
            "splits activations over tensor parallel ranks, and tensor_model_parallel_size is 1",
            "set it to false",
        )
    if cfg.expert_tensor_parallel_size > 1 and not cluster.gpus_per_node:
        yield Problem(
            f"{_CFG}.expert_tensor_parallel_size",
            f"{cfg.expert_tensor_parallel_size} needs GPUs (cluster.gpus_per_node is 0): experts get different numbers "
            "of tokens, and gloo gathers only equal ones",
            "set it to 1",
        )
    yield from _stages(cfg)
    found, key = devices(cluster), f"cluster.{'gpus_per_node' if cluster.gpus_per_node else 'cpu_processes'}"
    count = f"cluster.num_nodes x {key}"
    model = cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size * cfg.context_parallel_size
    if found % model:
        yield Problem(
            _CFG,
            f"tensor_model_parallel_size {cfg.tensor_model_parallel_size} x pipeline_model_parallel_size "
            f"{cfg.pipeline_model_parallel_size} x context_parallel_size {cfg.context_parallel_size} need groups of "
            f"{model} processes, and {count} is {found}",
            _more(key, model),
        )
        return
    experts = cfg.expert_model_parallel_size * cfg.expert_tensor_parallel_size * cfg.pipeline_model_parallel_size
    if found % experts:
        yield Problem(
            f"{_CFG}.expert_model_parallel_size",
            f"expert_model_parallel_size {cfg.expert_model_parallel_size} x expert_tensor_parallel_size "
            f"{cfg.expert_tensor_parallel_size} x pipeline_model_parallel_size {cfg.pipeline_model_parallel_size} need "
            f"groups of {experts} processes, and {count} is {found}",
            _more(key, experts),
        )


def _more(key: str, group: int) -> str:
    gpus = "" if key == "cluster.gpus_per_node" else " (on GPUs cluster.gpus_per_node)"
    return f"set {key}{gpus} to a multiple of {group}"


def _stages(cfg: MegatronConfig) -> Iterator[Problem]:
    """Settings of pipeline stages against each other."""
    given, pipeline = given_fields(cfg), cfg.pipeline_model_parallel_size
    virtual, layout = given.get("virtual_pipeline_model_parallel_size"), given.get("pipeline_model_parallel_layout")
    uneven = [name for name in _UNEVEN if given.get(name) is not None and given[name] is not False]
    if virtual is not None and virtual < 1:
        yield Problem(
            f"{_CFG}.virtual_pipeline_model_parallel_size", f"must be at least 1, is {virtual}", "set it to null"
        )
    elif virtual is not None and virtual > 1 and pipeline == 1:
        yield Problem(
            f"{_CFG}.virtual_pipeline_model_parallel_size",
            f"{virtual} stages on each rank need pipeline_model_parallel_size > 1, which is {pipeline}",
            "set it to null",
        )
    for name in [*uneven, *(["pipeline_model_parallel_layout"] if layout is not None else [])]:
        if pipeline == 1:
            yield Problem(f"{_CFG}.{name}", "means nothing: pipeline_model_parallel_size is 1", "remove it")
    if layout is not None and uneven:
        yield Problem(f"{_CFG}.pipeline_model_parallel_layout", f"and {uneven[0]} exclude each other", "remove one")
    if len({name.startswith("num") for name in uneven}) == 2:
        yield Problem(f"{_CFG}.{uneven[0]}", f"and {uneven[-1]} exclude each other", "remove one")
    for name in uneven:
        if given[name] is not True and given[name] < 1:
            yield Problem(f"{_CFG}.{name}", f"must be at least 1, is {given[name]}", "correct it")


def layout_problems(cfg: MegatronConfig, shape: ModelShape) -> list[Problem]:
    """What of a layout does not divide the model. Assumes that `parallel_problems` found nothing."""
    return [*_tensor(cfg, shape), *_experts(cfg, shape), *_layers(cfg, shape)]


def _tensor(cfg: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    key, size = "tensor_model_parallel_size", cfg.tensor_model_parallel_size
    yield from _divides(cfg, key, shape.heads, "attention heads")
    if size % shape.kv_heads:  # fewer of them than ranks are copied, if that comes out even
        yield from _divides(cfg, key, shape.kv_heads, "key-value heads")
    if shape.expert_layers < shape.layers:
        yield from _divides(cfg, key, shape.ffn, "rows of the MLP's matrices (intermediate_size)")


def _divides(cfg: MegatronConfig, key: str, count: int, what: str) -> Iterator[Problem]:
    size = getattr(cfg, key)
    if count % size:
        yield Problem(
            f"{_CFG}.{key}", f"{size} does not divide the model's {count} {what}", f"set a divisor of {count}"
        )


def _experts(cfg: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    if not shape.experts:
        yield from _no_experts(cfg)
        return
    yield from _divides(cfg, "expert_model_parallel_size", shape.experts, "experts")
    yield from _divides(cfg, "expert_tensor_parallel_size", shape.expert_ffn, "rows of an expert's matrices")
    if cfg.tensor_model_parallel_size > 1 and not cfg.sequence_parallel:
        yield Problem(
            f"{_CFG}.sequence_parallel",
            f"must be true: the model has experts, and tensor_model_parallel_size is {cfg.tensor_model_parallel_size}",
            "set it to true",
        )


def _no_experts(cfg: MegatronConfig) -> Iterator[Problem]:
    for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if getattr(cfg, key) > 1:
            yield Problem(f"{_CFG}.{key}", f"is {getattr(cfg, key)}, and the model has no experts to spread", "set 1")


def _layers(cfg: MegatronConfig, shape: ModelShape) -> Iterator[Problem]:
    given, pipeline, layers = given_fields(cfg), cfg.pipeline_model_parallel_size, shape.layers
    virtual = given.get("virtual_pipeline_model_parallel_size") or 1
    if given.get("pipeline_model_parallel_layout") is not None:
        yield from _explicit_layout(given["pipeline_model_parallel_layout"], layers, pipeline, virtual)
        return
    first, last = (given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    middle, stages = layers - (first or 0) - (last or 0), pipeline - (first is not None) - (last is not None)
    if first is not None or last is not None:
        where = f"{_CFG}.num_layers_in_{'first' if first is not None else 'last'}_pipeline_stage"
        said = ", ".join(f"{n} in the {end} stage" for n, end in ((first, "first"), (last, "last")) if n is not None)
        if middle < 0 or (stages == 0) != (middle == 0) or (stages and middle % stages):
            yield Problem(
                where,
                f"{said} leave {middle} of the {layers} layers for {stages} stages "
                f"(pipeline_model_parallel_size {pipeline})",
                "the other stages must have equally many layers, and at least one",
            )
        elif virtual > 1 and any(n % virtual for n in (first or 0, last or 0, middle // stages if stages else 0)):
            yield Problem(
                where,
                f"the layers of every stage must be a multiple of virtual_pipeline_model_parallel_size {virtual}",
                "correct one of them",
            )
        return
    counted = [name for name in _UNEVEN[2:] if given.get(name)]
    total = layers + len(counted)
    if total % (pipeline * virtual):
        parts = f"pipeline_model_parallel_size {pipeline}" + (
            f" x virtual_pipeline_model_parallel_size {virtual}" if virtual > 1 else ""
        )
        yield Problem(
            f"{_CFG}.pipeline_model_parallel_size",
            f"{parts} does not divide the model's {layers} layers"
            + (f" (and {len(counted)} for {' and '.join(counted)})" if counted else ""),
            f"set num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
            f"pipeline_model_parallel_layout, or a divisor of {total}",
        )
    elif counted and total // (pipeline * virtual) == 1:
        yield Problem(f"{_CFG}.{counted[0]}", "leaves a stage without any layer", "use fewer stages")


def _explicit_layout(layout: str | list[Any], layers: int, pipeline: int, virtual: int) -> Iterator[Problem]:
    where = f"{_CFG}.pipeline_model_parallel_layout"
    try:
        stages = _parse(layout)
    except ValueError as error:
        yield Problem(where, str(error), "for example Ett|tt|ttL, or [[embedding, decoder], [decoder, loss]]")
        return
    flat = [layer for stage in stages for layer in stage]
    if len(stages) != pipeline * virtual:
        yield Problem(
            where,
            f"has {len(stages)} stages, and pipeline_model_parallel_size x virtual_pipeline_model_parallel_size is "
            f"{pipeline} x {virtual}",
            "make them agree",
        )
    elif flat[:1] != ["embedding"] or flat[-1:] != ["loss"] or len(flat) - flat.count("decoder") != 2:
        yield Problem(where, "must begin with the embedding, end with the loss, and have layers between", "correct it")
    elif flat.count("decoder") != layers:
        yield Problem(where, f"has {flat.count('decoder')} layers, and the model has {layers}", "make them agree")
    elif any("decoder" not in stage for stage in stages):
        yield Problem(where, "has a stage without any layer", "give every stage at least one")


def _parse(layout: str | list[Any]) -> list[list[str]]:
    """Stages of layer names, from Megatron-Core's notation: E embedding, t layer, L loss, | between stages, *n repeats
    what stands before it (one letter, or several in parentheses)."""
    if isinstance(layout, list):
        if not all(isinstance(stage, list) and all(isinstance(layer, str) for layer in stage) for stage in layout):
            raise ValueError("must be a list of stages, each a list of layer names")
        stages = [[layer.strip().lower() for layer in stage] for stage in layout]
    else:
        text = layout.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), text)
        names = {"E": "embedding", "t": "decoder", "L": "loss"}
        wrong = [letter for letter in text if letter not in names and letter != "|"]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is none of E (embedding), t (layer), L (loss), |, *n and parentheses")
        stages = [[names[letter] for letter in stage] for stage in text.split("|")]
    for layer in (layer for stage in stages for layer in stage):
        if layer not in ("embedding", "decoder", "loss"):
            raise ValueError(f"{layer!r} is none of embedding, decoder, loss")
    return stages
