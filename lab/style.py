"""The report's style sheet: light and dark, wide and narrow."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6770; --line: #dde2e6; --page: #fff;
  --c0: #1565c0; --c1: #c62828; --c2: #2e7d32; --c3: #7b4fb5; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8eb; --soft: #9aa5ae; --line: #343c43; --page: #15191c;
  --c0: #64b5f6; --c1: #ef8a80; --c2: #81c784; --c3: #b79ae0; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; }
li { margin-bottom: .9rem; }
code { font-size: .9em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; min-width: 34rem; }
th, td { padding: .28rem .7rem .28rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 270px), 1fr)); }
figure { margin: 0; max-width: 34rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg text.title { fill: var(--ink); font-size: 13px; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-width: 1.8; stroke: currentColor; }
circle { fill: currentColor; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.faint { color: var(--soft); } .faint polyline { stroke-dasharray: 4 3; }
figcaption { font-size: .8rem; } .key { margin-right: 1em; }
.key::before { content: "— "; }
.bar { display: inline-block; height: .7em; min-width: 1px; background: var(--c0); }
"""
