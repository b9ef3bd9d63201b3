"""The table of audited engines, from what `assisted audit --json FILE` wrote for each.

    python benchmarks/audits.py --add "vLLM-CPU 0.32, n-gram=vllm.json" --docs docs/howto/audit.md

The reports are kept in audits.json; a name that is there already is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tables import publish

from assisted.bench.table import markdown_table

FILE = Path(__file__).with_name("audits.json")
CHECKS = ("greedy text", "sampled tokens", "seeds", "stop strings", "log probabilities", "JSON")


def cell(finding: dict[str, Any]) -> str:
    figures, verdict = finding["figures"], finding["verdict"]
    if verdict == "not tested":
        return "–"
    if finding["check"] == "greedy text":
        of = f"{figures['equal']} equal, {len(figures['near_ties'])} near-ties, {len(figures['wrong'])} wrong"
    elif finding["check"] == "sampled tokens":
        observed, expected = figures["observed"][0], figures["expected"][0]
        of = f"p = {figures['p_value']:.2g}, {figures['tokens']} tokens, top-1 {observed:.1%} for {expected:.1%}"
    elif finding["check"] == "log probabilities":
        of = f"{figures['most']:.2g}" + (
            f", {zeros} of {figures['tokens']} are 0" if (zeros := figures.get("zeros")) else ""
        )
    else:
        tried = figures.get("texts", figures.get("answers"))
        of = f"{figures['equal'] if 'equal' in figures else tried - len(figures['wrong'])} of {tried}"
    return f"**failed**: {of}" if verdict == "failed" else of


def markdown(reports: dict[str, Any]) -> str:
    rows = []
    for name, report in reports.items():
        found = {finding["check"]: cell(finding) for finding in report["findings"]}
        rows.append([name, *(found[check] for check in CHECKS)])
    return "\n".join(markdown_table(["engine", *CHECKS], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--add", metavar="NAME=FILE", action="append", default=[], help="a report and its name in the table"
    )
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose measured section is rewritten")
    args = parser.parse_args()
    reports = json.loads(FILE.read_text()) if FILE.is_file() else {}
    for one in args.add:
        name, _, file = one.rpartition("=")
        reports[name] = json.loads(Path(file).read_text())
    FILE.write_text(json.dumps(reports, indent=1) + "\n")
    publish(markdown(reports), args.docs)


if __name__ == "__main__":
    main()
