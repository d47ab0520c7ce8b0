"""What the lab's HTML pages share: the frame, tables, charts side by side, bars, and the style sheet."""

from __future__ import annotations

import re
from html import escape

from lab.tables import Table

# light and dark, wide and narrow
STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6770; --line: #dde2e6; --page: #fff; --card: #f5f7f8;
  --c0: #1565c0; --c1: #c62828; --c2: #2e7d32; --c3: #7b4fb5; --c4: #b26a00; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8eb; --soft: #9aa5ae; --line: #343c43; --page: #15191c; --card: #1d2327;
  --c0: #64b5f6; --c1: #ef8a80; --c2: #81c784; --c3: #b79ae0; --c4: #e0a95a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; overflow-wrap: anywhere; }
li { margin-bottom: .9rem; }
code { font-size: .9em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; min-width: 34rem; }
th, td { padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.claims td:nth-child(2) { white-space: nowrap; font-weight: 600; }
.claims td:nth-child(3) { color: var(--soft); font-size: .8rem; }
.holds { color: var(--c2); } .fails { color: var(--c1); } .open { color: var(--soft); }
.charts { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.wide td:first-child { white-space: nowrap; } .wide td:nth-child(2) { min-width: 7rem; }
figure { margin: 0 0 .8rem; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg text.title { fill: var(--ink); font-size: 13px; font-weight: 600; }
svg text.letter { fill: currentColor; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-width: 1.8; stroke: currentColor; }
polygon { fill: currentColor; opacity: .18; }
circle { fill: currentColor; }
.interval { stroke: currentColor; stroke-width: 1.4; opacity: .6; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .faint { color: var(--soft); } .faint polyline { stroke-dasharray: 4 3; }
.dash1 polyline { stroke-dasharray: 7 3; } .dash2 polyline { stroke-dasharray: 2 2; }
.dash3 polyline { stroke-dasharray: 8 3 2 3; } .dash4 polyline { stroke-dasharray: 12 4; }
figcaption { font-size: .8rem; line-height: 1.7; } .key { margin-right: 1em; display: inline-block; }
.key::before { content: "— "; }
.bars { display: grid; grid-template-columns: auto 1fr; gap: .3rem .8rem; font-size: .86rem; align-items: center;
  max-width: 60rem; } .bars > span { white-space: nowrap; }
.bar { display: inline-block; height: .9em; min-width: 2px; margin-right: .5em; background: currentColor;
  vertical-align: middle; }
.pair { background: var(--card); border-radius: .5rem; padding: .6rem .9rem; margin: 0 0 .7rem; max-width: 46rem; }
.pair p { margin: .1rem 0; } .pair .who { color: var(--soft); font-size: .8rem; margin-right: .5em; }
@media (max-width: 40rem) {
  body { padding: .8rem; }
  .claims table, .claims tbody, .claims tr, .claims td { display: block; min-width: 0; }
  .claims tr:first-child { display: none; }
  .claims tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .bars { grid-template-columns: 1fr; gap: .1rem; } .bars > span:nth-child(odd) { white-space: normal; }
  .claims td { border: 0; padding: .1rem 0; }
}
"""


def page(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def marked(text: str) -> str:
    """Text whose code and bold marks are Markdown's, as HTML."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text).replace("\n", "<br>")


def section(table: Table | None, between: str = "") -> str:
    """A heading, what to know, perhaps charts, and the table."""
    if table is None:
        return ""
    return f"<h2>{marked(table.title)}</h2><p>{marked(table.note)}</p>{between}{html(table)}"


def html(table: Table) -> str:
    """The table alone; on a narrow screen it scrolls inside its frame."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.heads)
    lines = []
    for row in table.rows:
        cells = (f'<td class="{"" if i < table.words else "n"}">{marked(c)}</td>' for i, c in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def charts(found: list[str]) -> str:
    """Charts side by side where there is room."""
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def bars(found: list[tuple[str, str, float, str]]) -> str:
    """Horizontal bars: name, text, length as a part of the longest, style."""
    lines = (
        f'<span>{escape(name)}</span><span class="{style}"><span class="bar" style="width:{45 * part:.2f}%"></span>'
        f"{escape(text)}</span>"
        for name, text, part, style in found
    )
    return f'<div class="bars">{"".join(lines)}</div>'
