"""What the demo's page is made of: the frame, charts side by side, bars, and the style sheet."""

from __future__ import annotations

from html import escape

# light and dark, wide and narrow
STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6770; --line: #dde2e6; --page: #fff; --card: #f5f7f8;
  --c0: #1565c0; --c1: #c62828; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8eb; --soft: #9aa5ae; --line: #343c43; --page: #15191c; --card: #1d2327;
  --c0: #64b5f6; --c1: #ef8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0 0 .8rem; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg text.title { fill: var(--ink); font-size: 13px; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-width: 1.8; stroke: currentColor; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); }
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
  .bars { grid-template-columns: 1fr; gap: .1rem; } .bars > span:nth-child(odd) { white-space: normal; }
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
