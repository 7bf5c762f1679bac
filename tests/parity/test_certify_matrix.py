"""Every parallel layout against transformers in float64, packed and unpacked, for each model family.

Covers: data-parallel ranks with fewer tokens count more; context parallelism counted as data parallelism; uneven
microbatch counts; packed boundaries and their alignment.
"""

import pytest

from grpo_recipes.proof.certificate.certify import Bench, make_plan, open_bench
from grpo_recipes.proof.certificate.layouts import parse
from grpo_recipes.proof.certificate.pool import Pool
from grpo_recipes.proof.certificate.subject import subject_of

pytestmark = pytest.mark.timeout(300)

DENSE = [
    *("one", "tp2", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2", "cp4"),
    *("tp2.pp2.sp", "tp2.cp2", "pp2.cp2", "dp2.cp2"),
]
# Megatron-Core trains experts under tensor parallelism only with sequence parallelism.
EXPERTS = [
    *("one", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2", "cp4", "ep2"),
    *("tp2.pp2.sp", "tp2.cp2.sp", "pp2.cp2", "dp2.cp2", "tp2.ep2.sp", "tp2.ep2.dp2.sp"),
]
WHOLE = {"llama": DENSE, "qwen3": DENSE, "qwen3_moe": EXPERTS}
# Of the families that share nearly everything with one of these, what concerns their own tensors.
PART = {"qwen2": ["one", "tp2.sp", "tp2.pp2.sp"], "mixtral": ["one", "ep2", "tp2.ep2.dp2.sp"]}


@pytest.fixture(scope="module")
def pool():
    """Four processes for all families: each imports once."""
    with Pool(4, "cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(request, pool: Pool):
    plan = make_plan(subject_of(None, [], request.param), whole_matrix=True, device="cpu")
    if request.param in WHOLE:
        assert set(plan.layouts) == {parse(text) for text in WHOLE[request.param]}
    with open_bench(plan, pool) as opened:
        yield opened


@pytest.mark.parametrize(
    ("bench", "layout"),
    [(family, layout) for family, layouts in (WHOLE | PART).items() for layout in layouts],
    indirect=["bench"],
    scope="module",
)
def test_a_layout_changes_nothing(bench: Bench, layout: str) -> None:
    packed, unpacked = bench.run(parse(layout))
    assert (packed.cut, packed.failures) == ("packed", ())
    assert (unpacked.cut, unpacked.failures) == ("unpacked", ())
