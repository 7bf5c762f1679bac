"""Floating-point operations of a decoder-only transformer, from the numbers of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.recipe.architecture import head_width, number_of_experts


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide the work per token. A dense model has no experts, and `expert_layers` is 0."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner width of a dense layer's gated MLP
    vocab: int
    experts: int = 0  # of a layer with experts
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0  # inner width of the experts that see every token, together
    expert_layers: int = 0  # how many of the layers have experts in place of the dense MLP


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """From a config.json of Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral.

    Raises:
        KeyError: it lacks one of the sizes.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    experts = number_of_experts(config)
    dense = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step") or 1
    expert_layers = sum(1 for i in range(layers) if experts and i not in dense and (i + 1) % every == 0)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_width(config),
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        expert_ffn=(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0,
        shared_expert_ffn=(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        expert_layers=expert_layers,
    )


def matmul_parameters(shape: ModelShape) -> int:
    """Weights that each token is multiplied with: projections, MLP or active experts, router, output layer.

    The embedding is looked up, and norms and biases are not products of matrices: none of them counts.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)  # q and output, k and v
    active = shape.experts_per_token * shape.expert_ffn + shape.shared_expert_ffn
    expert_mlp = 3 * shape.hidden * active + shape.hidden * shape.experts  # gate, up, down; and the router
    dense_mlp = 3 * shape.hidden * shape.ffn
    dense_layers = shape.layers - shape.expert_layers
    mlps = dense_layers * dense_mlp + shape.expert_layers * expert_mlp
    return shape.layers * attention + mlps + shape.hidden * shape.vocab


def sequence_cost(tokens: int, shape: ModelShape) -> int:
    """FLOPs of forward and backward over one sequence of so many tokens; a forward pass alone takes a third.

    6 N n + 6 L H D n^2, for N matmul parameters (`matmul_parameters`), L layers, H heads of D numbers, n tokens.
    A product of matrices takes 2 FLOPs per weight and token forward and twice that backward: 6 N. Attention of a
    token to t others takes 2 H D t for the scores and 2 H D t for the mix, the same again twice backward, so
    12 L H D t; under a causal mask t is n / 2 on average. Source: Chowdhery et al. (2022), PaLM, appendix B
    (6 N + 12 L H Q T per token, there without the causal half). Padding and recomputation are not counted.
    """
    attention = 6 * shape.layers * shape.heads * shape.head_dim
    return tokens * (6 * matmul_parameters(shape) + attention * tokens)
