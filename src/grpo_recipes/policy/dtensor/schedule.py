"""Learning rate and weight decay of an optimizer step, in closed form. Pure functions, without torch.

The same as Megatron-Core's OptimizerParamScheduler, of whose arguments `Schedule` has the names. Step k, from 0:

    k <= warm-up, warm-up > 0:  init + (max - init) k / warm-up
    constant:                   max
    k > decay:                  min
    inverse-square-root:        max sqrt(warm-up) / sqrt(k), at least min
    linear, cosine:             min + (max - min) c((k - warm-up) / (decay - warm-up)),
                                c(x) = 1 - x, or (1 + cos pi x) / 2
    WSD:                        min + (max - min) c((k - (decay - wsd)) / wsd) over the last `wsd` steps, max before;
                                c also 2 / 2^x - 1 (exponential), 1 - sqrt x (minus_sqrt)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@dataclass(frozen=True)
class Schedule:
    """Units: optimizer steps (see recipe.megatron.scheduler_arguments)."""

    max_lr: float
    min_lr: float
    init_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def learning_rate(self, step: int) -> float:
        warmup = self.lr_warmup_steps
        if warmup > 0 and step <= warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * step / warmup
        if self.lr_decay_style == "constant":
            return self.max_lr
        if step > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None and self.lr_wsd_decay_style is not None
            begun = step - (self.lr_decay_steps - self.wsd_decay_steps)
            share = 1.0 if begun <= 0 else SHAPES[self.lr_wsd_decay_style](begun / self.wsd_decay_steps)
        else:
            share = SHAPES[self.lr_decay_style]((step - warmup) / (self.lr_decay_steps - warmup))
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def weight_decay(self, step: int) -> float:
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        share = 1 - SHAPES[self.wd_incr_style](step / self.wd_incr_steps)
        return self.start_wd + share * (self.end_wd - self.start_wd)
