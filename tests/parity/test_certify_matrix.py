"""Every parallel layout against transformers in float64: Llama, Qwen3 and Qwen3-MoE, packed and unpacked.

Covers: data-parallel ranks with fewer tokens count more; context parallelism counted as data parallelism; uneven
microbatch counts; packed boundaries and their alignment.
"""

import pytest

from grpo_recipes.proof.certify import Bench, make_plan, open_bench
from grpo_recipes.proof.certify_layouts import Layout, parse
from grpo_recipes.proof.certify_subject import subject_of

pytestmark = pytest.mark.timeout(300)

MATRIX = {
    "llama": (
        "one",
        "tp2",
        "tp2.sp",
        "pp2",
        "pp2.vpp2",
        "dp2",
        "cp2",
        "cp4",
        "tp2.pp2.sp",
        "tp2.cp2",
        "pp2.cp2",
        "dp2.cp2",
    ),
    "qwen3": (
        "one",
        "tp2",
        "tp2.sp",
        "pp2",
        "pp2.vpp2",
        "dp2",
        "cp2",
        "cp4",
        "tp2.pp2.sp",
        "tp2.cp2",
        "pp2.cp2",
        "dp2.cp2",
    ),
    # Megatron-Core trains experts under tensor parallelism only with sequence parallelism.
    "qwen3_moe": (
        "one",
        "tp2.sp",
        "pp2",
        "pp2.vpp2",
        "dp2",
        "cp2",
        "cp4",
        "ep2",
        "tp2.pp2.sp",
        "tp2.cp2.sp",
        "pp2.cp2",
        "dp2.cp2",
        "tp2.ep2.sp",
        "tp2.ep2.dp2.sp",
    ),
}


@pytest.fixture(scope="module")
def bench(request):
    """One pool of four processes for a whole family."""
    plan = make_plan(subject_of(None, [], request.param), whole_matrix=True, device="cpu")
    assert set(plan.layouts) == {parse(text) for text in MATRIX[request.param]}
    with open_bench(plan) as opened:
        opened.run(Layout())  # starts the processes, so that the seconds of a test are its layout's own
        yield opened


@pytest.mark.parametrize(
    ("bench", "layout"),
    [(family, layout) for family, layouts in MATRIX.items() for layout in layouts],
    indirect=["bench"],
    scope="module",
)
def test_a_layout_changes_nothing(bench: Bench, layout: str) -> None:
    packed, unpacked = bench.run(parse(layout))
    assert (packed.cut, packed.failures) == ("packed", ())
    assert (unpacked.cut, unpacked.failures) == ("unpacked", ())
