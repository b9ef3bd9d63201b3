"""An audit as text and as one HTML file. Knows its result only."""

from __future__ import annotations

import json
from html import escape

from ..bench.table import document
from .checks import FAILED, NOT_TESTED, Audit

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --ground: #fff; --line: #dde1e6; --passed: #1b7f4b; --failed: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --ground: #15171a; --line: #30343a; --passed: #5fc08c; --failed: #ef7a6d; }
}
body { margin: 0 auto; padding: 2rem 1.25rem; max-width: 56rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .6rem .4rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.passed { color: var(--passed); } .failed { color: var(--failed); font-weight: 600; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85em; }
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
    return document(title, _STYLE, body)


def _conclusion(found: Audit) -> str:
    def those(verdict: str) -> str:
        return ", ".join(finding.check for finding in found.findings if finding.verdict == verdict)

    said = "Lossless, as far as tested." if found.is_lossless else "Not lossless."
    if failed := those(FAILED):
        said += f" Failed: {failed}."
    if skipped := those(NOT_TESTED):
        said += f" Not tested: {skipped}."
    return said
