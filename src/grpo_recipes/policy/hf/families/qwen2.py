"""Qwen2 and Qwen2.5, and DeepSeek's Qwen distillations: a Llama with biases in the attention's input projections."""

from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.families.parts import INPUT_NORM, MLP, MLP_NORM, OUTER, PROJECTION, QKV, QKV_BIAS

FAMILY = Family(
    "qwen2", lambda hf: {"add_qkv_bias": True}, OUTER, (INPUT_NORM, QKV, QKV_BIAS, PROJECTION, MLP_NORM, *MLP)
)
