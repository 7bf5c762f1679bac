"""Names of layouts, which model takes which, and how a certificate cuts its batch."""

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.layouts import Layout, fitting, layers_for, matrix, parse, recipes_own, unfit
from grpo_recipes.proof.certificate.shares import microbatches, shares
from grpo_recipes.recipe.schema import MegatronConfig
from grpo_recipes.recipe.shrink import FAMILIES, shrink

DENSE, EXPERTS = shrink(FAMILIES["llama"]), shrink(FAMILIES["qwen3_moe"])


@pytest.mark.parametrize(
    ("text", "layout", "processes", "printed"),
    [
        ("one", Layout(), 1, "one"),
        ("tp2", Layout(tp=2), 2, "tp2"),
        ("sp.pp2.tp2", Layout(tp=2, pp=2, sp=True), 4, "tp2.pp2.sp"),
        ("TP2·CP2", Layout(tp=2, cp=2), 4, "tp2.cp2"),
        ("pp2+vpp2", Layout(pp=2, vpp=2), 2, "pp2.vpp2"),
        ("ep2", Layout(ep=2, dp=2), 2, "ep2.dp2"),
        ("ep2.tp2.sp", Layout(tp=2, ep=2, sp=True), 2, "tp2.ep2.sp"),
        ("ep4.cp2", Layout(cp=2, ep=4, dp=2), 4, "cp2.ep4.dp2"),
        ("dp2.cp2", Layout(cp=2, dp=2), 4, "cp2.dp2"),
    ],
)
def test_notation(text: str, layout: Layout, processes: int, printed: str) -> None:
    assert parse(text) == layout
    assert layout.processes == processes
    assert str(layout) == printed
    assert parse(printed) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' in 'tp' is unknown"),
        ("tp2.tp4", "'tp4' in 'tp2.tp4' is twice"),
        ("tp0", "'tp0'"),
        ("", "'' in '' is unknown"),
        ("sp", "sequence parallelism"),
        ("vpp2", "virtual pipeline stages"),
        ("ep4.dp2", "do not fit tp x cp x dp = 2"),
    ],
)
def test_bad_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(text)
    assert caught.value.where == "--layout"


@pytest.mark.parametrize(
    ("text", "config", "reason"),
    [
        ("tp2", DENSE, None),
        ("tp4.dp2", DENSE, None),  # two ranks share each of the 2 key-value heads
        ("tp3", DENSE, "tp3 does not divide 8 query heads"),
        ("tp4", {"num_attention_heads": 12, "num_key_value_heads": 3}, "tp4 does not divide 3 key-value heads"),
        ("ep2", DENSE, "no experts"),
        ("ep2", EXPERTS, None),
        ("ep16", EXPERTS, "ep16 does not divide 8 experts"),
        ("tp2", EXPERTS, "only with sequence parallelism"),
        ("tp2.sp", EXPERTS, None),
    ],
)
def test_what_a_model_can_take(text: str, config: dict, reason: str | None) -> None:
    found = unfit(parse(text), config)
    assert found is None if reason is None else reason in found


def names(layouts: list[Layout]) -> list[str]:
    return [str(layout) for layout in layouts]


def test_two_processes_take_each_dimension_alone() -> None:
    assert names(fitting(DENSE, 2)) == ["tp2", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2"]
    assert names(fitting(EXPERTS, 2)) == ["tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2", "ep2.dp2", "tp2.ep2.sp"]


def test_the_recipes_own_layout_is_added_where_it_fits() -> None:
    megatron = MegatronConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=4, sequence_parallel=True)
    own = recipes_own(megatron, replicated=True)
    assert str(own) == "tp2.pp2.dp2.sp"
    assert own not in fitting(DENSE, 4, own)
    assert own in fitting(DENSE, 8, own)
    assert fitting(DENSE, 2, Layout()) == fitting(DENSE, 2)


def test_the_recipes_own_layout_holds_its_experts() -> None:
    assert str(recipes_own(MegatronConfig(expert_model_parallel_size=8), replicated=False)) == "ep2.dp2"


def test_matrix() -> None:
    common = ["pp2", "pp2.vpp2", "dp2", "cp2", "cp4"]
    assert names(matrix(DENSE)) == [
        *("tp2", "tp2.sp", *common),
        *("tp2.pp2.sp", "tp2.cp2", "pp2.cp2", "cp2.dp2"),
    ]
    assert names(matrix(EXPERTS)) == [
        *("tp2.sp", *common, "ep2.dp2"),
        *("tp2.pp2.sp", "tp2.cp2.sp", "pp2.cp2", "cp2.dp2", "tp2.ep2.sp", "tp2.ep2.dp2.sp"),
    ]


def test_every_pipeline_divides_the_layers() -> None:
    assert layers_for([Layout()]) == 4
    assert layers_for([parse("pp2.vpp2"), parse("pp4")]) == 4
    assert layers_for([parse("pp3"), parse("pp2.vpp2")]) == 12
    assert layers_for([parse("pp4.vpp2")]) == 8


def test_shares_are_uneven_and_leave_one_rank_empty() -> None:
    assert shares(6, 1) == [[0, 1, 2, 3, 4, 5]]
    assert shares(6, 2) == [[0, 1, 2, 3], [4, 5]]
    assert shares(6, 4) == [[0, 1, 2, 3], [4], [5], []]


def test_every_rank_runs_as_many_microbatches() -> None:
    assert microbatches(6, 0, 2, "packed", 1) == [[0, 1, 2], [3]]
    assert microbatches(6, 1, 2, "packed", 1) == [[4, 5], []]
    assert microbatches(6, 1, 2, "unpacked", 1) == [[4], [5], [], []]
    assert microbatches(6, 0, 1, "packed", 4) == [[0, 1, 2], [3, 4, 5], [], []]
    assert microbatches(6, 3, 4, "unpacked", 1) == [[], [], [], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_no_sequence_is_lost(ranks: int) -> None:
    assert sorted(s for share in shares(6, ranks) for s in share) == list(range(6))
