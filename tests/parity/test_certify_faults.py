"""A certificate that has never failed proves nothing: each planted fault must fail it, and be named."""

import pytest

from grpo_recipes.proof.certificate.certify import Bench, Certificate, make_plan, open_bench
from grpo_recipes.proof.certificate.layouts import Layout, parse
from grpo_recipes.proof.certificate.pool import Pool
from grpo_recipes.proof.certificate.subject import subject_of
from grpo_recipes.proof.certificate.tolerances import FLOAT32
from grpo_recipes.proof.certificate.verdict import Row

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def bench():
    plan = make_plan(subject_of(None, [], "llama"), ["tp2.sp", "dp2"], device="cpu")
    with Pool(2, "cpu") as pool, open_bench(plan, pool) as opened:
        yield opened


def exit_code(bench: Bench, rows: list[Row]) -> int:
    return Certificate(bench.plan, FLOAT32, tuple(rows)).exit_code


def above(row: Row, what: str, limit: float) -> set[str]:
    return {name for name, difference in getattr(row.measured, what).items() if difference > limit}


@pytest.mark.parametrize("layout", ["one", "tp2.sp", "dp2"])
def test_without_a_fault_it_passes(bench: Bench, layout: str) -> None:
    rows = bench.run(parse(layout))
    assert [row.failures for row in rows] == [(), ()]
    assert exit_code(bench, rows) == 0


@pytest.mark.parametrize("layout", ["one", "tp2.sp"])
def test_swapped_query_rows_are_named(bench: Bench, layout: str) -> None:
    """Covers: a tensor that is loaded in the wrong order."""
    rows = bench.run(parse(layout), "swapped_qk_rows")
    assert exit_code(bench, rows) == 1
    for row in rows:
        assert above(row, "loaded", 0.0) == {"model.layers.0.self_attn.q_proj.weight"}
        assert any("weight as loaded: model.layers.0.self_attn.q_proj.weight" in failure for failure in row.failures)
        # Also without looking at the weights themselves.
        assert row.measured.logprob > 100 * FLOAT32.logprob
        assert "model.layers.0.self_attn.q_proj.weight" in above(row, "gradients", 100 * FLOAT32.gradient)


def test_a_missing_reduction_names_the_norms(bench: Bench) -> None:
    """Covers: gradients of replicated weights that tensor-parallel ranks do not sum."""
    rows = bench.run(parse("tp2.sp"), "missing_reduction")
    assert exit_code(bench, rows) == 1
    norms = {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(4)
        for name in ("input_layernorm", "post_attention_layernorm")
    } | {"model.norm.weight"}
    for row in rows:
        assert above(row, "gradients", FLOAT32.gradient) == norms
        assert "layernorm.weight differs by" in " ".join(row.failures)
        assert row.measured.logprob < FLOAT32.logprob  # the forward pass is right


def test_a_shifted_boundary_fails_what_is_packed(bench: Bench) -> None:
    """Covers: packed boundaries off by one."""
    rows = bench.run(parse("one"), "shifted_boundary")
    assert exit_code(bench, rows) == 1
    packed, unpacked = rows
    assert packed.measured.logprob > 100 * FLOAT32.logprob
    assert packed.measured.loss > 100 * FLOAT32.loss
    assert unpacked.failures == ()


def test_a_halved_denominator_on_one_rank_fails_its_layout(bench: Bench) -> None:
    """Covers: data-parallel ranks with fewer tokens count more."""
    rows = bench.run(parse("dp2"), "halved_denominator")
    assert exit_code(bench, rows) == 1
    for row in rows:
        assert row.layout == "dp2"
        assert row.measured.loss > 100 * FLOAT32.loss
        assert row.measured.grad_norm > 100 * FLOAT32.grad_norm
        assert len(above(row, "gradients", 100 * FLOAT32.gradient)) > 30
        assert row.measured.logprob < FLOAT32.logprob


def test_a_layout_that_ends_its_processes_fails_alone(bench: Bench) -> None:
    rows = bench.run(Layout(ep=2, dp=2))  # experts of a model that has none: refused by Megatron-Core
    assert exit_code(bench, rows) == 1
    assert all(row.measured is None and row.failures and "Traceback" in row.details for row in rows)
    assert [row.failures for row in bench.run(parse("dp2"))] == [(), ()]
