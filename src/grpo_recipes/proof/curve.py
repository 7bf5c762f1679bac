"""The picture of a recipe's curve: `python -m grpo_recipes.proof.curve OUT.svg RUN… [--reference FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_recipes.errors import UserError
from grpo_recipes.proof.band import ACCURACY, Band, find_band, read_band, run_seed
from grpo_recipes.proof.charts import HEIGHT, WIDTH, Line, line_chart, svg_legend
from grpo_recipes.proof.report import reference_area
from grpo_recipes.proof.style import STANDALONE_CSS
from grpo_recipes.runs.files import write_atomically
from grpo_recipes.runs.folder import open_run
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import read_metrics, series


def curve_svg(run_dirs: Sequence[str | Path], reference: Band | None = None) -> str:
    """Held-out accuracy of the runs over the steps, with the reference band behind, as an SVG file of its own.

    Raises:
        UserError: no such run, or one without evaluations.
    """
    lines = []
    for index, folder in enumerate(map(open_run, run_dirs)):
        points = series(read_metrics(folder.metrics_path), ACCURACY)
        if not points:
            raise UserError(f"has no {ACCURACY}", where=str(folder.path), mend="let it reach an evaluation")
        lines.append(Line(f"seed {run_seed(read_manifest(folder))}", points, f"s{index % 9 + 1}"))
    area = reference_area(reference, ACCURACY)
    svg = line_chart("Held-out accuracy over the steps", lines, area=area, percent=True, y_range=(0.0, 1.0))
    svg = svg[: svg.index("</svg>")]  # the legend in HTML that follows is of no use to a picture
    keys = [(line.style, line.label) for line in lines] + ([("band", area.label)] if area else [])
    rows = [keys[i : i + 5] for i in range(0, len(keys), 5)] if len(lines) > 2 else [keys]
    for index, row in enumerate(rows):
        svg += svg_legend(row, HEIGHT + 14 + 18 * index)
    height = HEIGHT + 6 + 18 * len(rows)
    head = f'width="{2 * WIDTH}" height="{2 * height}" viewBox="0 0 {WIDTH} {height}"'
    svg = svg.replace(f'viewBox="0 0 {WIDTH} {HEIGHT}"', head, 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}<style>{STANDALONE_CSS}</style>{svg[start:]}</svg>\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m grpo_recipes.proof.curve", description=__doc__)
    parser.add_argument("out", metavar="OUT.svg", type=Path)
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--reference", type=Path, help="default: the published one of the first run's recipe, if any")
    options = parser.parse_args(arguments)
    try:
        recipe = read_manifest(open_run(options.runs[0]))["recipe"]["name"]
        path = options.reference or find_band(recipe)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, curve_svg(options.runs, read_band(path) if path else None))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
