"""Versioned GRPO post-training recipes on one Megatron-Core engine."""

__version__ = "0.1.0"
