"""Qwen3 without experts: a Llama whose queries and keys are normalised within each head before they are rotated."""

from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.families.parts import INPUT_NORM, MLP, MLP_NORM, OUTER, PROJECTION, QK_NORMS, QKV

FAMILY = Family(
    "qwen3", lambda hf: {"qk_layernorm": True}, OUTER, (INPUT_NORM, QKV, *QK_NORMS, PROJECTION, MLP_NORM, *MLP)
)
