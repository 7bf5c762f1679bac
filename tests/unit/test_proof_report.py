import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from synthetic_runs import write_run

from grpo_recipes.errors import UserError
from grpo_recipes.proof.band import make_band, write_band
from grpo_recipes.proof.curve import curve_svg
from grpo_recipes.proof.curve import main as curve_main
from grpo_recipes.proof.report import phase_seconds, write_report
from grpo_recipes.proof.rollout_html import MAX_TOKENS, chosen, rollout_card, safe
from grpo_recipes.runs.metrics import MetricsRow
from grpo_recipes.runs.rollouts import Rollout

HOSTILE = "<script>alert(1)</script><img src=http://x.example/y onerror=z>\"'&\x00\x1b\u202e\ud800"
VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Tags, attributes and text, and whether every tag that opens closes."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    root = tmp_path_factory.mktemp("reference")
    runs = [write_run(root / f"seed-{seed}", seed).path for seed in range(3)]
    write_band(root / "reference.json", make_band(runs))
    return root


@pytest.fixture(scope="module")
def report(reference):
    run = write_run(reference / "mine", 100)
    return write_report(run.path, reference).read_text()


def test_report_tells_the_run_in_words(report):
    text = re.sub(r"\s+", " ", "".join(Page(report).text))
    assert "tiny_arith@v1" in text
    assert "150 of 150 steps with seed 100 on 2 cores of A CPU." in text
    assert "Accuracy on 256 held-out problems went from 4" in text
    assert "Reproduced: this run lies inside the reference band." in text
    assert "reference, lowest to highest of 3 seeds" in text
    assert "digest-100" in text
    for heading in ("Accuracy on held-out problems", "Reward of the rollouts", "Seconds of each step", "Entropy, nats",
                    "Peak memory by phase", "Largest difference of a logprob", "Gradient norm", "Rollouts",
                    "policy_training", '"torch": "2.11.0"'):  # fmt: skip
        assert heading in text, heading


def test_report_is_one_well_formed_file_that_asks_the_network_for_nothing(report):
    page = Page(report)
    assert page.open == []
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {name for name, _ in page.attributes} & {"src", "href", "onload", "onerror", "onclick", "srcset"}
    assert "url(" not in report
    assert "@import" not in report
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert set(re.findall(r"https?://[^\"' <]+", report)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    for svg in re.findall(r"<svg.*?</svg>", report):
        ElementTree.fromstring(svg)


def test_nothing_a_model_writes_reaches_the_page_as_markup(tmp_path):
    run = write_run(tmp_path / "run", 1, hostile=HOSTILE)
    markup = write_report(run.path).read_text()
    page = Page(markup)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.open == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in markup
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", markup)


def test_report_of_a_run_that_has_just_begun(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_recipes.proof.report.find_band", lambda recipe: None)  # not even a reference to draw
    run = write_run(tmp_path / "run", 1, last=0)
    run.metrics_path.unlink()
    text = "".join(Page(write_report(run.path).read_text()).text)
    assert "0 of 150 steps" in text
    assert "no data" in text
    with pytest.raises(UserError, match="no such run"):
        write_report(tmp_path / "absent")


def test_a_reference_of_another_version_is_not_drawn(tmp_path, reference):
    run = write_run(tmp_path / "run", 1)
    run.manifest_path.write_text(run.manifest_path.read_text().replace('"version": "v1"', '"version": "v2"'))
    markup = write_report(run.path, reference).read_text()
    assert "lowest to highest" not in markup
    assert "It cannot be told" in markup


def test_what_the_phases_leave_of_a_step_is_other():
    timing = {"generation": 1.0, "policy_training": 2.0, "total": 3.5, "checkpoint": 9.0, "training_tokens_per_s": 7.0}
    rows = [MetricsRow(1, 4, "train", {}, timing), MetricsRow(1, 4, "val", {}, {"evaluation": 5.0})]
    assert phase_seconds(rows) == {
        "generation": {4: 1.0}, "policy_training": {4: 2.0}, "evaluation": {4: 5.0}, "checkpoint": {4: 9.0},
        "other": {4: 0.5},
    }  # fmt: skip


def test_tokens_are_marked_by_how_unlikely_they_were():
    card = rollout_card(
        Rollout("p", "ab", 1.0, 0.5, "stop", (7, 8), (0.0, -4.0), (0.0, -4.5), tokens=("a", "b"), answer="42")
    )
    assert 'rgba(var(--mark),0.00)" title="token 7, logprob 0, probability 1">a</span>' in card
    assert 'rgba(var(--mark),0.75)" title="token 8, logprob -4, probability 0.0183">b</span>' in card
    assert "largest difference to the trainer 0.5" in card
    assert "answer: 42" in card


def test_a_very_long_response_is_cut():
    count = MAX_TOKENS + 50
    card = rollout_card(Rollout("p", "x" * count, 0.0, 0.0, "length", (1,) * count, (-1.0,) * count,
                                tokens=("x",) * count))  # fmt: skip
    assert card.count("<span class=") == MAX_TOKENS
    assert "… 50 more tokens" in card
    assert "… 12000 more characters" in rollout_card(Rollout("p", "y" * 20000, 0.0, 0.0, "length"))


def test_rollouts_that_say_most_are_chosen():
    rollouts = [Rollout("", "", r, None, "stop") for r in (0.5, None, 1.0, 0.0, 0.7, 0.2, 0.1)]
    assert [r.reward for r in chosen(rollouts, 4)] == [None, 1.0, 0.0, 0.7]
    assert chosen([], 4) == []


def test_safe_keeps_ordinary_text():
    for text in ("Straße 日本 😀\n\t¼", "👩\u200d🔬"):
        assert safe(text) == text


def test_curve_is_a_picture_of_its_own(reference, tmp_path):
    out = tmp_path / "docs" / "curve.svg"
    runs = [str(reference / f"seed-{seed}") for seed in range(3)]
    curve_main([str(out), *runs, "--reference", str(reference / "reference.json")])
    root = ElementTree.fromstring(out.read_text())
    assert root.get("width") == "800"
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    for label in ("seed 0", "seed 2", "reference, lowest to highest of 3 seeds", "100 %"):
        assert label in texts
    assert len([e for e in root.iter() if "line" in (e.get("class") or "").split()]) == 3
    assert "var(--line" in out.read_text()  # each variable carries its own colour for want of a page
    assert not re.search(r"var\(--\w+\)", out.read_text())


def test_curve_needs_an_evaluation(tmp_path):
    run = write_run(tmp_path / "run", 1, last=0)
    run.metrics_path.write_text("")
    with pytest.raises(UserError, match="has no val/accuracy"):
        curve_svg([run.path])
    with pytest.raises(SystemExit, match="no such run folder"):
        curve_main([str(tmp_path / "c.svg"), str(tmp_path / "absent")])
