"""How a certificate cuts a step: very uneven over data-parallel ranks, with ranks and passes that have nothing."""

from __future__ import annotations

from itertools import pairwise

from grpo_recipes.proof.certificate.verdict import Cut

BIN = 3  # sequences of a packed microbatch


def shares(sequences: int, ranks: int) -> list[list[int]]:
    """Sequences of each data-parallel rank. The first has most; of three or more ranks the last has none."""
    if ranks == 1:
        return [list(range(sequences))]
    sizes = [2] if ranks == 2 else [*[1] * (ranks - 2), 0]
    bounds = [0, sequences - sum(sizes)]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def microbatches(sequences: int, rank: int, ranks: int, cut: Cut, multiple: int) -> list[list[int]]:
    """Indices of each microbatch of a rank, as many as every other rank has; an empty list is an empty microbatch."""
    size = BIN if cut == "packed" else 1
    cuts = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares(sequences, ranks)]
    passes = -(-max(map(len, cuts)) // multiple) * multiple
    return cuts[rank] + [[] for _ in range(passes - len(cuts[rank]))]
