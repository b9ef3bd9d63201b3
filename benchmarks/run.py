"""The benchmarks. A case measures, makes its tables, and knows the sections of docs/ that show them.

python benchmarks/run.py                              the cases
python benchmarks/run.py grown --help                 what a case measures, and its options
python benchmarks/run.py grown --threads 1 --json --pages
                                                      measure; write benchmarks/grown.json and the page
python benchmarks/run.py grown --read --pages         the tables again, from the committed figures
python benchmarks/run.py heads step --quick           the smallest measurement of several, to try them
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import time
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # the checkout is measured, wherever the package is installed
HELP = {
    "prompts": "of each kind",
    "repeats": "timed repeats",
    "new_tokens": "of each call",
    "no_compile": "leave out what has to be compiled first, plain or not",
    "dtype": "of the weights",
    "model": "the target: a folder, a Hub id or a zoo: name",
}
"""Of options that several cases have."""
QUICK = {"prompts": 1, "repeats": 1, "new_tokens": 8, "no_compile": True}


@cache
def names() -> dict[str, tuple[str, str]]:
    """By name, the module of each case and what it measures, without importing any."""
    found = {}
    for path in (FOLDER / "cases").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Case":
                name, about = map(ast.literal_eval, node.args[:2])
                found[name] = path.stem, about
    return dict(sorted(found.items()))


def load(name: str) -> Any:
    """A case, from its module."""
    from shared import Case

    module = importlib.import_module(f"cases.{names()[name][0]}")
    return next(one for one in vars(module).values() if isinstance(one, Case) and one.name == name)


def options_of(case: Any) -> dict[str, tuple[Any, str]]:
    """Default and help, by name."""
    from shared import RACE_OPTIONS

    own = (RACE_OPTIONS if case.races else {}) | case.options
    return {name: one if isinstance(one, tuple) else (one, HELP[name]) for name, one in own.items()}


def parser_of(cases: list[Any]) -> argparse.ArgumentParser:
    prog = " ".join(["run.py", *(case.name for case in cases)])
    doc = "\n".join(case.about for case in cases) or __doc__
    parser = argparse.ArgumentParser(prog, None, doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="", help="write the figures to this file (default: CASE.json here)")
    parser.add_argument("--quick", action="store_true", help="as little as possible, to try the case")
    parser.add_argument(
        "--read", nargs="?", const="", help="measure nothing: take the figures of this file, or CASE.json"
    )
    parser.add_argument("--pages", action="store_true", help="write the tables into docs/, from the committed figures")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--device", default="cpu", help="of races (default: %(default)s)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine: the time of this process; one thread"
    )
    for name, (default, text) in {k: v for case in cases for k, v in options_of(case).items()}.items():
        flag, shown = f"--{name.replace('_', '-')}", f"{text} (default: {default})".replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=text)
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(flag, nargs="*", type=kind, metavar="ONE", help=shown)
        else:
            parser.add_argument(flag, type=type(default) if default is not None else str, metavar="ONE", help=shown)
    return parser


def arguments_of(case: Any, given: argparse.Namespace) -> argparse.Namespace:
    """What was given, and the case's own defaults for the rest."""
    defaults = {name: default for name, (default, _) in options_of(case).items()}
    quick = {**QUICK, **case.quick} if given.quick else {}
    defaults |= {name: value for name, value in quick.items() if name in defaults}
    chosen = {name: value for name in defaults if (value := getattr(given, name)) is not None}
    common = {name: getattr(given, name) for name in ("quick", "threads", "device", "cpu_time")}
    return argparse.Namespace(**{**defaults, **chosen, **common})


def measure(case: Any, args: argparse.Namespace, path: Path | None) -> Any:
    """The figures. path: a file for them, also of a measurement that is stopped."""
    import torch
    from shared import run_races, write_json

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.cpu_time:
        time.perf_counter = time.process_time
    args.save, args.path = lambda found: write_json(path, found), path
    found = run_races(case.races(args), args) if case.races else case.measure(args)
    args.save(found)
    return found


def section_text(case: Any, section: Any) -> str:
    """What a section shows, from the committed figures."""
    texts = []
    for file in section.files or (case.name,):
        found = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))
        texts.append(case.text({t: found[t] for t in ("about", *section.titles)} if section.titles else found))
    return "\n\n".join(texts)


def main(words: list[str]) -> None:
    chosen = list(takewhile(lambda word: not word.startswith("-"), words))
    known = names()
    if not words:
        print("\n".join(f"{name:18} {about.splitlines()[0]}" for name, (_, about) in known.items()))
        return
    if unknown := set(chosen) - set(known):
        sys.exit(f"run.py: no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    cases = [load(name) for name in chosen]
    given = parser_of(cases).parse_args(words[len(chosen) :])
    for case in cases:
        own, found = FOLDER / f"{case.name}.json", None
        if given.read is None:
            path = None if given.json is None else Path(given.json or own)
            found = measure(case, arguments_of(case, given), path)
        elif given.read or not given.pages:  # sections may show other files than this one
            found = json.loads(Path(given.read or own).read_text(encoding="utf-8"))
        if found is not None:
            print(case.text(found))
        for section in case.sections if given.pages else ():
            from shared import publish

            publish(section_text(case, section), [FOLDER.parent / "docs" / f"{section.page}.md"], section.marker)
        if case.check and found is not None:
            case.check(found)


if __name__ == "__main__":
    main(sys.argv[1:])
