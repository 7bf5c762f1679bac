"""`nemo-run certify refit` on a pipeline of two ranks: what passes, and a fault of the second refit only."""

from __future__ import annotations

import json

from grpo_recipes.proof.refit_certificate.command import run


def test_a_fault_of_the_second_refit_is_found_and_named(tmp_path, capsys):
    """Covers: the second refit corrupts weights."""
    status = run(
        None,
        [],
        family="llama",
        layout="pp2",
        transport="broadcast",
        device="cpu",
        precision="float32",
        output=tmp_path,
        plant="second_refit",
    )
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "refit_certificate.json").read_text())
    first, second = found["rows"]
    assert status == 1 and found["passed"] is False
    assert first["failure"] == "" and first["stats"]["certified"] is True and 0 < first["stats"]["largest_gap"] < 1e-4
    assert first["changed"] == first["stats"]["tensors"] == second["changed"]
    assert second["stats"] is None and "lm_head.weight differs" in second["failure"]
    assert "lm_head.weight differs" in shown and "FAILED" in shown
