"""The default process group of a trainer."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join() -> None:
    """Join the default group, from torchrun's variables, or alone without any port. Does nothing a second time."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
