"""What a certificate allows, fixed before anything is measured.

float32 and bfloat16 round to one part in 2^24 and 2^9. A layout changes the order of sums (over heads, columns, ranks,
microbatches), never what is summed, so its differences are rounding carried through a few layers. The reference is
computed in float64, except where transformers itself uses float32 (norms, router, angles of rotary positions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Tolerances:
    """loss: absolute, in nats, of any of the three steps. logprob: absolute, in nats, of any token. gradient: of any
    element, relative to the largest element of its tensor (or to `small` times the largest of the model, if that is
    more: a tensor whose gradient all but cancels has rounding of that order). grad_norm: relative, of any of the three
    steps. weight: of any element after three steps, beyond the rounding of the stored weight, relative to the largest
    change of its tensor. entropy: relative, of the sum over the tokens of a step."""

    loss: float
    logprob: float
    gradient: float
    grad_norm: float
    weight: float
    entropy: float
    small: float
    reason: str


FLOAT32 = Tolerances(
    loss=1e-5,
    logprob=2e-5,
    gradient=1e-4,
    grad_norm=2e-5,
    weight=1e-3,
    entropy=1e-5,
    small=1e-3,
    reason=(
        "6e-8 a rounding, times logits of up to 10 and some tens of roundings in a row: about 1e-6 for logprobs and "
        "1e-5 for elements of gradients; allowed is ten times as much. Three steps of Adam with epsilon 0.01 amplify "
        "an error of the gradient less than tenfold. Sums over tokens average it. A planted fault is a thousand times "
        "larger."
    ),
)

BFLOAT16 = Tolerances(
    loss=2e-2,
    logprob=1.5e-1,
    gradient=1.5e-1,
    grad_norm=1e-1,
    weight=4e-1,
    entropy=2e-2,
    small=1e-2,
    reason=(
        "2e-3 a rounding, times logits of up to 10 and some tens of roundings of random sign: about 5e-2 for single "
        "logprobs and single elements of gradients, a tenth of it for sums over many; the gradient norms of steps two "
        "and three are those of weights that have already drifted apart. Faults in few elements hide below this: "
        "float32 is the certificate, bfloat16 shows that the mixed-precision path follows it."
    ),
)


def tolerances(precision: Precision) -> Tolerances:
    return FLOAT32 if precision == "float32" else BFLOAT16
