"""A page of HTML that needs nothing but itself: style inside, pictures as SVG, no script, and a policy that forbids the
browser to fetch anything."""

from collections.abc import Iterable, Sequence
from html import escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5d6878; --line: #dfe3e9;
  --c0: #2f6fb7; --c1: #d9782d; --c2: #2a9d74; --c3: #c2466e; --c4: #7a5cc0; --c5: #9a7b1f; --c6: #3c9fb5; --c7: #6c7480; }
@media (prefers-color-scheme: dark) { :root { --page: #14181e; --card: #1d232b; --text: #e4e8ee; --soft: #9aa5b4;
  --line: #343c47; --c0: #6fa8e6; --c1: #f0a468; --c2: #5fcba3; --c3: #e87fa0; --c4: #ab93e8; --c5: #d0b35a; --c6: #74cbdf;
  --c7: #a4adba; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 17px; margin: 0 0 2px; } p { margin: 0; } .soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; }
.figures b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px; min-width: 0; }
section.wide { grid-column: 1 / -1; } section > p.soft { font-size: 13px; margin-bottom: 8px; }
section > div { overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--text); font-size: 11px; } svg text.axis { fill: var(--soft); } .middle { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: var(--line); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 4; } .mark { stroke-width: 1.5; stroke-dasharray: 2 3; }
.mark.failure { stroke: #d43a3a; } .mark.move { stroke: var(--c4); } .mark.checkpoint { stroke: var(--c7); opacity: .5; }
rect.d1 { opacity: .6; } rect.d2 { opacity: .35; } rect.d3 { opacity: .2; }
rect.op { stroke: var(--card); stroke-width: .6; } svg text.op { fill: #10151c; font-size: 10px; }
.op.forward { fill: #8ab8ea; background: #8ab8ea; } .op.backward { fill: #f2b27c; background: #f2b27c; }
.op.input { fill: #f2d07c; background: #f2d07c; } .op.weight { fill: #9fd6b8; background: #9fd6b8; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; } tr.failure td:first-child { border-left: 3px solid #d43a3a; }
tr.move td:first-child { border-left: 3px solid var(--c4); }
pre { font-size: 12px; line-height: 1.4; margin: 0; }
""" + "\n".join(f".curve.s{i} {{ stroke: var(--c{i}); }} .dot.s{i}, .bar.s{i} {{ fill: var(--c{i}); }} "
                f".legend .s{i} {{ background: var(--c{i}); }}" for i in range(8))


def page(title: str, subtitle: str, figures: Sequence[tuple[str, str]], sections: Iterable[str]) -> str:
    """The whole file. figures: (name, value) at the top. sections: what `section` makes."""
    cards = "".join(f"<div><span class=soft>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in figures)
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
            f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
            f'<style>{STYLE}</style></head>\n'
            f'<body><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p><div class="figures">{cards}</div>\n'
            f'<div class="charts">\n{"".join(sections)}</div></body></html>\n')


def section(name: str, text: str, inside: str, *, wide: bool = False) -> str:
    """A card. text: one sentence that says how to read it. inside: HTML."""
    return (f'<section{" class=wide" if wide else ""}><h2>{escape(name)}</h2><p class="soft">{escape(text)}</p>'
            f'<div>{inside}</div></section>\n')


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Sequence[int] = (0,),
          kinds: Sequence[str] = ()) -> str:
    """Cells are text. text_columns: to the left, others are numbers. kinds: class of each row."""
    def cell(tag: str, column: int, value: str) -> str:
        return f"<{tag}{' class=text' if column in text_columns else ''}>{escape(value)}</{tag}>"

    def row(tag: str, values: Sequence[str], kind: str = "") -> str:
        cells = "".join(cell(tag, column, value) for column, value in enumerate(values))
        return f"<tr{f' class={kind}' if kind else ''}>{cells}</tr>"

    listed = list(rows)
    lines = [row("td", values, kind) for values, kind in zip(listed, kinds or [""] * len(listed), strict=True)]
    return f"<table>{row('th', head)}{''.join(lines)}</table>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
