"""Llama 2 and 3, and what shares their architecture (SmolLM2, DeepSeek's Llama distillations)."""

from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.families.parts import INPUT_NORM, MLP, MLP_NORM, OUTER, PROJECTION, QKV

FAMILY = Family("llama", lambda hf: {}, OUTER, (INPUT_NORM, QKV, PROJECTION, MLP_NORM, *MLP))
