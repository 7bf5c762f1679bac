"""The look of the report and of its charts."""

from __future__ import annotations

# Categorical colours by Okabe and Ito (2008), told apart also with a colour vision deficiency.
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a800", "#5b4a9e")

CHART_CSS = """
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;text-anchor:middle;fill:var(--soft,#57606a)}
svg text.end{text-anchor:end}svg text.start{text-anchor:start}
svg .grid{stroke:var(--line,#d8dee4);stroke-width:.7;fill:none}
svg .axis{stroke:var(--soft,#57606a);stroke-width:1;fill:none}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}
svg .line.ref{stroke:var(--soft,#57606a);stroke-width:1.4;stroke-dasharray:5 4}
svg .line.alt{stroke-width:1.4;stroke-dasharray:2 3}
svg .band{fill:var(--band,#c9d1d9);opacity:.7}
""" + "".join(
    f"svg .line.s{i}{{stroke:{colour}}}svg .fill.s{i},svg .dot.s{i}{{fill:{colour}}}"
    for i, colour in enumerate(SERIES, start=1)
)

PAGE_CSS = (
    """
:root{--ink:#1f2328;--soft:#57606a;--line:#d8dee4;--paper:#fff;--card:#f6f8fa;--band:#c9d1d9;
--good:#1a7f37;--bad:#b42318;--open:#8a6100;--mark:214,120,0}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b1;--line:#30363d;--paper:#0d1117;--card:#161b22;
--band:#3d444d;--good:#4ac26b;--bad:#ff7b72;--open:#d4a72c;--mark:255,166,40}}
@media print{:root{--ink:#000;--soft:#444;--line:#ccc;--paper:#fff;--card:#fff;--band:#c9d1d9;--good:#1a7f37;
--bad:#b42318;--open:#8a6100;--mark:214,120,0}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 48px;max-width:1180px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:.2em 0}h2{font-size:1.2rem;margin:2em 0 .6em}
h3{font-size:.95rem;margin:0 0 .4em}p{margin:.5em 0}
.soft{color:var(--soft)}.small{font-size:.85rem}code,pre{font:.85em/1.45 ui-monospace,Menlo,Consolas,monospace}
code{overflow-wrap:anywhere}
.verdict{border-left:4px solid;padding:.5em .9em;background:var(--card);margin:1em 0}
.verdict b{display:block;font-size:1.05rem}.verdict ul{margin:.3em 0 0;padding-left:1.1em;font-size:.9rem}
.reproduced{border-color:var(--good)}.reproduced b{color:var(--good)}
.not-reproduced{border-color:var(--bad)}.not-reproduced b{color:var(--bad)}
.cannot-tell{border-color:var(--open)}.cannot-tell b{color:var(--open)}
.tiles{display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));margin:1em 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.6em .8em}
.tile b{display:block;font-size:1.25rem;line-height:1.3}.tile span{color:var(--soft);font-size:.8rem}
.wide,.grid{display:grid;gap:16px}
.wide{grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
.grid{grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
.wide>*,.grid>*{min-width:0}
figure{margin:0;break-inside:avoid;border:1px solid var(--line);border-radius:6px;padding:12px}
figure svg{display:block;width:100%;height:auto;max-width:620px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.8rem;color:var(--soft);margin:.4em 0 0}
.key{display:inline-block;width:14px;height:8px;border-radius:2px;margin-right:5px}.key.band{background:var(--band)}
.key.ref{height:0;border-radius:0;border-top:2px dashed var(--soft);vertical-align:middle}
table{border-collapse:collapse;font-size:.88rem;width:100%}th,td{text-align:right;padding:.25em .5em;
border-bottom:1px solid var(--line);white-space:nowrap}th:first-child,td:first-child{text-align:left}
.rollout{border:1px solid var(--line);border-radius:6px;padding:10px 12px;break-inside:avoid}
.rollout pre{margin:.3em 0;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:20em;
overflow:auto}
.rollout .facts{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.8rem;color:var(--soft)}
.tok{border-radius:2px;box-shadow:inset 0 -1px var(--line)}
details{border:1px solid var(--line);border-radius:6px;padding:.5em .9em;margin:.6em 0}
summary{cursor:pointer}details pre{overflow-x:auto}
@media print{body{font-size:10pt;max-width:none;padding:0}h2{break-after:avoid}.wide,.grid{grid-template-columns:1fr 1fr}
.rollout pre{max-height:none}.tok{print-color-adjust:exact}
svg,.key,.verdict{print-color-adjust:exact}}
"""
    + "".join(f".key.s{i}{{background:{colour}}}" for i, colour in enumerate(SERIES, start=1))
    + CHART_CSS
)

# A picture shown by <img> knows nothing of the page around it: it brings its own ground.
STANDALONE_CSS = "svg{background:#fff}" + CHART_CSS
