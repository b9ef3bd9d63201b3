"""An audit as text and as one HTML file. Knows its result only."""

from __future__ import annotations

import json
from html import escape

from ..bench.table import document
from .checks import FAILED, NOT_TESTED, Audit

_STYLE = """
body { max-width: 56rem; } table { width: 100%; }
th, td { padding-left: 0; text-align: left; vertical-align: top; white-space: normal; }
.passed { color: light-dark(#1b7f4b, #5fc08c); } .failed { color: light-dark(#c0392b, #ef7a6d); font-weight: 600; }
"""


def told(found: Audit) -> str:
    """The report as text, for a terminal or an issue."""
    about = f"{found.prompts} prompts, {found.settings.new_tokens} new tokens each"
    lines = [f"{found.subject}, compared with {found.reference}: {about}"]
    width = max(len(finding.check) for finding in found.findings)
    lines += [f"{one.verdict:<10}  {one.check:<{width}}  {one.told}" for one in found.findings]
    return "\n".join([*lines, _conclusion(found)])


def html(found: Audit) -> str:
    """The same as a page that needs no other file, with all figures."""
    rows = "".join(
        f'<tr><td class="{one.verdict.replace(" ", "-")}">{one.verdict}</td>'
        f"<td>{escape(one.check)}</td><td>{escape(one.told)}</td></tr>"
        for one in found.findings
    )
    title = escape(f"Is {found.subject} lossless?")
    figures = escape(json.dumps(found.to_dict(), indent=1))
    body = (
        f"<h1>{title}</h1><p>Compared with {escape(found.reference)}: {found.prompts} prompts. {escape(_conclusion(found))}</p>"
        f"<table><tr><th>verdict</th><th>check</th><th>result</th></tr>{rows}</table>"
        f"<h2>All figures</h2><pre>{figures}</pre>"
    )
    return document(title, body, _STYLE)


def _conclusion(found: Audit) -> str:
    def those(verdict: str) -> str:
        return ", ".join(finding.check for finding in found.findings if finding.verdict == verdict)

    said = "Lossless, as far as tested." if found.is_lossless else "Not lossless."
    if failed := those(FAILED):
        said += f" Failed: {failed}."
    if skipped := those(NOT_TESTED):
        said += f" Not tested: {skipped}."
    return said
