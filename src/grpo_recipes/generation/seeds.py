"""One seed for every sample of a run."""

from __future__ import annotations

import hashlib
import struct


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The sampling seed of one completion, 63 bits, the same on every machine and every Python.

    Arguments are integers of at most 64 bits, signed. `prompt_index` is the prompt's place in the whole batch of the
    step, not in a replica's share of it, so that no two replicas draw the same stream and no layout changes a draw.
    """
    place = struct.pack("<4q", run_seed, step, prompt_index, sample_index)
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1
