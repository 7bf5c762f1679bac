"""Every file that CONTRIBUTING.md names is there, every link leads somewhere, and the README leads to every page."""

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


def links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 8
    assert [(page.name, target) for page in pages for target in links(page) if not target.exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    assert set((ROOT / "docs").resolve().glob("*.md")) - links(ROOT / "README.md") == set()
