"""Every file that CONTRIBUTING.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_file_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|tests|recipes|launchers|containers|results)/[\w./-]+)`", text)
    assert len(named) > 30
    placeholders = ("NAME", "FAMILY")
    assert [n for n in named if not (ROOT / n).exists() and not any(word in n for word in placeholders)] == []
