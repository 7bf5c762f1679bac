"""Rotary frequencies from a Hugging Face configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.attention import Rotary
from grpo_recipes.recipe.architecture import ROPE_TYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rotary_of(hf: PretrainedConfig, device: torch.device | str = "cpu") -> Rotary:
    """transformers 5 moves what older files call rope_theta and rope_scaling into `rope_parameters`.

    Raises UserError for a scaling that depends on the length of the input (dynamic, longrope).
    """
    parameters = hf.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
        return Rotary((1.0 / parameters["rope_theta"] ** exponents).to(device))
    if kind not in ROPE_TYPES:
        raise UserError(
            f"rope_type {kind!r} is not supported",
            where="config.json: rope_parameters",
            mend=f"known: {', '.join(ROPE_TYPES)}",
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device(device))
    return Rotary(frequencies.to(torch.float32), factor)
