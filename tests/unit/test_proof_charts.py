import math
import xml.etree.ElementTree as ElementTree

import pytest

from grpo_recipes.proof.charts import (
    Area,
    Frame,
    Line,
    bar_chart,
    line_chart,
    log_ticks,
    number,
    stacked_chart,
    thin,
    tick_labels,
    ticks,
)


def svg(markup):
    return ElementTree.fromstring(markup[: markup.index("</svg>") + 6])


def paths(markup, style):
    return [e.get("d") for e in svg(markup).iter() if style in (e.get("class") or "").split() and e.get("d")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.42, 0.93, [0.4, 0.6, 0.8, 1.0]),
        (0, 150, [0, 50, 100, 150]),
        (-0.03, 0.05, [-0.04, -0.02, 0, 0.02, 0.04, 0.06]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
        (5, 5, [4.5, 4.75, 5.0, 5.25, 5.5]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected, abs=1e-12)


def test_log_ticks_enclose_the_range():
    assert log_ticks(2e-12, 3e-11) == pytest.approx([1e-12, 1e-11, 1e-10])
    assert log_ticks(1, 1) == [1, 10]
    many = log_ticks(1e-20, 1.0)
    assert len(many) <= 7
    assert many[-1] >= 1


def test_labels_tell_neighbours_apart():
    assert tick_labels([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_labels([0, 50, 100]) == ["0", "50", "100"]
    assert tick_labels([0, 2.5, 5.0]) == ["0.0", "2.5", "5.0"]
    assert tick_labels([0, 0.5, 1], percent=True) == ["0 %", "50 %", "100 %"]
    assert tick_labels([0, 5e-5, 1e-4]) == ["0", "5e-5", "1e-4"]
    assert tick_labels([1.0, 1.00001]) == ["1.00000", "1.00001"]
    assert tick_labels([7.0]) == ["7"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.12345, "0.123"), (1234.5, "1,234"), (2.04e-12, "2e-12"), (1.54e-4, "1.5e-4"), (math.nan, "nan"),
     (2e7, "2e7"), (-3e-7, "-3e-7")],
)  # fmt: skip
def test_numbers_for_people(value, expected):
    assert number(value) == expected


def test_frame_puts_corners_at_the_corners_of_the_plot():
    frame = Frame((0, 10), (0, 1))
    assert (frame.px(0), frame.py(0)) == (56, 200)
    assert (frame.px(10), frame.py(1)) == (386, 12)
    log = Frame((0, 10), (1e-2, 1), log=True)
    assert log.py(0.1) == pytest.approx(106)


def test_line_goes_through_the_points_and_leaves_out_what_is_not_finite():
    markup = line_chart("t", [Line("a", [(0, 0.0), (5, math.nan), (10, 1.0)])])
    assert paths(markup, "line") == ["M56.0 200.0L386.0 12.0"]
    assert len([e for e in svg(markup).iter() if e.tag.endswith("circle")]) == 2


def test_log_chart_leaves_out_zero():
    assert paths(line_chart("t", [Line("a", [(0, 0.0), (5, 1.0), (10, 10.0)])], log=True), "line")[0].count("L") == 1


def test_band_is_a_closed_outline():
    area = Area("reference", [0, 10], [0.0, 0.5], [0.5, 1.0])
    markup = line_chart("t", [Line("run", [(0, 0.2), (10, 0.7)])], area=area)
    (outline,) = paths(markup, "band")
    assert outline == "M56.0 106.0L386.0 12.0L386.0 106.0L56.0 200.0Z"
    assert "reference" in markup[markup.index("</svg>") :]


def test_empty_and_single_points_do_not_fail():
    assert "no data" in line_chart("t", [])
    assert "no data" in line_chart("t", [Line("a", [(1, math.nan)])])
    assert paths(line_chart("t", [Line("a", [(3, 0.5)])]), "line") == ["M221.0 106.0"]
    assert "no data" in stacked_chart("t", [], {}, "s")
    assert svg(bar_chart("t", {"a": 0.0}, "MiB")) is not None


def test_stacked_areas_add_up():
    markup = stacked_chart("t", [0, 10], {"a": [1.0, 1.0], "b": [1.0, 3.0]}, "s")
    first, second = paths(markup, "fill")
    assert first == "M56.0 153.0L386.0 153.0L386.0 200.0L56.0 200.0Z"
    assert second == "M56.0 106.0L386.0 12.0L386.0 153.0L56.0 153.0Z"


def test_long_runs_are_thinned_by_means():
    points = [(float(i), float(i)) for i in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == 400
    assert thinned[0] == (12.0, 12.0)
    assert thin(points[:400]) is not None
    assert len(thin(points[:400])) == 400


def test_steps_are_whole():
    texts = [e.text for e in svg(line_chart("t", [Line("a", [(1, 0.0), (10, 1.0)])])).iter() if e.tag.endswith("text")]
    assert [text for text in texts if text in ("2.5", "5", "7.5", "10")] == ["5", "10"]


def test_labels_are_escaped():
    hostile = "<script>\"'&"
    for markup in (
        line_chart(hostile, [Line(hostile, [(0, 1.0)]), Line("b", [(0, 1.0)])]),
        bar_chart(hostile, {hostile: 1.0}, hostile),
        stacked_chart(hostile, [0, 1], {hostile: [1.0, 2.0]}, hostile),
    ):
        assert "<script" not in markup
        svg(markup)
