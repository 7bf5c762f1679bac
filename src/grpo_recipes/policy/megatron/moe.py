"""Losses that a mixture of experts adds by itself: load balancing (moe_aux_loss_coeff) and z-loss (moe_z_loss_coeff).

Megatron-Core attaches them to the router's output rather than to the loss, and with calculate_per_token_loss it weighs
those of a microbatch by its tokens (TopKRouter.attach_and_log_load_balancing_loss), expecting every gradient to be
divided by the tokens of the whole step in the end. Here the loss arrives as a share of the step and nothing is divided
in the end, so these losses have to carry that division themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def set_aux_loss_scale(config: TransformerConfig, tokens: int) -> None:
    """Before each training pass of a model with experts.

    Args:
        tokens: that routers will see in all microbatches of the step on all data-parallel ranks, padding included, not
            multiplied by tensor or context parallel size.

    What is added to the loss is then, with T_m tokens in microbatch m and T = `tokens`, for each layer

        sum over m of T_m / T * (moe_aux_loss_coeff * E sum_i f_i P_i + moe_z_loss_coeff * mean logsumexp(logits)^2)

    (Switch Transformer, arXiv 2101.03961, eq. 4; ST-MoE, arXiv 2202.08906, eq. 5). The z-loss does not depend on how the
    step is cut into microbatches and ranks. The load f_i is that of a microbatch, of all its tokens over tensor- and
    context-parallel ranks: the balancing loss depends on the cut as far as the microbatches' loads differ.
    """
    scale = torch.tensor([1.0 / tokens])
    # Megatron adds each such loss up by layer in one object of the process, made for the first model that trains in it:
    # nobody reads the sums, and a deeper model would not fit.
    destroy_moe_metrics_tracker()
    config.moe_grad_scale_func = lambda: scale
