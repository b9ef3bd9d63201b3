"""The home page's chart, from the figures in smollm2_bfloat16.json: bars with their intervals, as SVG, without a library."""

from __future__ import annotations

import html
import json
from pathlib import Path

FIGURES = Path(__file__).with_name("smollm2_bfloat16.json")
SHOWN = {  # contestant -> what the chart calls it; of transformers' own, whichever settings were its fastest
    "plain": "plain generate",
    "transformers lookup": "transformers prompt lookup",
    "no draft": "assisted, no draft",
    '"suffix"': "assisted, suffix draft",
    '"self:int8"': "assisted, 8-bit copy",
    '["suffix", "self:int8"]': "assisted, both drafts",
}
GREY, ORANGE, BLUE = "#8b93a1", "#c47f13", "#4f7fd9"
LINE, LEFT, WIDTH = 26, 178, 480


def chart(path: Path = FIGURES) -> str:
    """Speedups over the fastest plain mode, a panel for each race in the file. Text and axes have the page's colour."""
    results = json.loads(path.read_text(encoding="utf-8"))
    panels = [(title, _rows(race["points"][0]["rows"])) for title, race in results.items() if title != "about"]
    longest = max(row[4] for _, rows in panels for row in rows)
    scale = (WIDTH - LEFT - 40) / longest
    parts, top = [], 0
    for title, rows in panels:
        parts.append(f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{title}</text>')
        top += 28
        for name, colour, ratio, low, high in rows:
            middle = top + LINE / 2
            parts += [
                f'<text x="{LEFT - 10}" y="{middle + 4:g}" text-anchor="end">{html.escape(name)}</text>',
                f'<rect x="{LEFT}" y="{top + 4}" width="{ratio * scale:.1f}" height="{LINE - 8}" fill="{colour}"/>',
                f'<path d="M{LEFT + low * scale:.1f} {middle:g}H{LEFT + high * scale:.1f}" stroke="currentColor"/>',
                f'<text x="{LEFT + max(ratio, high) * scale + 6:.1f}" y="{middle + 4:g}">{ratio:.2f}</text>',
            ]
            top += LINE
        parts.append(
            f'<path d="M{LEFT + scale:.1f} {top - LINE * len(rows)}V{top}" stroke="currentColor" stroke-dasharray="2 3"/>'
        )
        top += 14
    described = "; ".join(f"{title}: " + ", ".join(f"{row[0]} {row[2]:.2f}" for row in rows) for title, rows in panels)
    return (
        f'<svg viewBox="0 0 {WIDTH} {top}" role="img" aria-label="Times plain. {html.escape(described, quote=True)}" '
        'font-size="13" fill="currentColor">\n' + "\n".join(parts) + "\n</svg>"
    )


def _rows(rows: list[dict]) -> list[tuple[str, str, float, float, float]]:
    """Name, colour, ratio and interval of the contestants in SHOWN."""
    found = []
    for row in rows:
        known = SHOWN.get(row["name"]) or SHOWN.get(row["family"] if row["family"].startswith("transformers") else "")
        if known:
            colour = {"plain": GREY, "assisted": BLUE}.get(row["family"], ORANGE)
            found.append((known, colour, *(row["speedup"][key] for key in ("ratio", "low", "high"))))
    return found
