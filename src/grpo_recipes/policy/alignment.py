"""To which multiples of tokens parallelism rounds sequences and packs up. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """Tokens. Each sequence is padded to a multiple of `sequence`, then one more sequence, which nothing looks at,
    fills the pack up to a multiple of `pack`."""

    sequence: int
    pack: int


def alignment(*, tensor_parallel: int, context_parallel: int, sequence_parallel: bool) -> Alignment:
    """Context parallelism cuts every sequence into 2 x CP equal chunks, of which each rank takes two; sequence
    parallelism cuts what a rank holds of the pack into equal parts for its TP ranks."""
    sequence = 2 * context_parallel if context_parallel > 1 else 1
    return Alignment(sequence, sequence * tensor_parallel if sequence_parallel else sequence)
