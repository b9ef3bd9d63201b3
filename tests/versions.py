"""The page "Supported versions": in which versions of transformers the tests pass, and what came of each.

    python tests/versions.py [--only VERSION ...] [--cases N] [--page PAGE.md]

Makes an environment for each version in .venv-versions, runs the quick tests, the fuzzer and ten drafts there, one after the
other, and writes the table of the page. Without a page, the table is printed. Exit status 1 where something failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-versions"
VERSIONS = ("oldest", "5.14", "5.17", "newest", "pre-release")
OLDEST = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]  # type: ignore[index]
NEEDED = ("accelerate", "gguf", "hypothesis", "pytest", "rich", "scipy")
QUICK = ("continued", "decoding", "distribution", "eagle", "libraries", "medusa", "sampling", "trust")
FEW = ("cache", "libraries", "medusa_heads", "sampling")  # for continuous integration
DRAFTS = (
    "early-exit:2",
    "layer-skip",
    "ngram",
    "recycle",
    "suffix",
    "zoo:draft",
    "zoo:draft-other-tokenizer",
    "zoo:eagle3",
    "zoo:medusa",
    "suffix,zoo:draft",
)
BLOCK = re.compile(r"(?<=<!-- versions: written by `make versions-check` -->\n).*?(?=\n<!-- end of versions -->)", re.S)


@dataclass(frozen=True)
class Row:
    """What came of one version.

    Args:
        transformers, torch, python: as installed.
        tests: "passed, skipped, failed". fuzzed: the fuzzer's first line. exact: of `DRAFTS`, those with plain `generate`'s
            tokens and with accepted drafts.
        failed: whether anything failed.
    """

    transformers: str
    torch: str
    python: str
    tests: str
    fuzzed: str
    exact: int
    failed: bool


def environment(wanted: str) -> Path:
    """The Python of an environment with this version, which is made if it is not there. wanted: one of `VERSIONS`."""
    python = FOLDER / wanted / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / wanted], check=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    wanted = OLDEST if wanted == "oldest" else wanted
    release = f"transformers=={wanted}.*" if wanted[0].isdigit() else "transformers"
    newest = {"newest": ["--upgrade"], "pre-release": ["--upgrade", "--pre"]}.get(wanted, [])
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *shlex.split(os.environ.get("TORCH_ARGS", "")), torch], check=True)
    subprocess.run([*pip, *newest, release, torch], check=True)  # a pre-release of transformers alone
    subprocess.run([*pip, release, torch, *NEEDED], check=True)
    return python


def installed(python: Path) -> list[str]:
    """The versions of transformers, torch and Python."""
    code = "import sys, torch, transformers as t; print(t.__version__, torch.__version__, sys.version.split()[0])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def tried(python: Path, names: tuple[str, ...], cases: int) -> Row:
    """Run everything with this Python. names: of test files. cases: of the fuzzer."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        print("$", *words, flush=True)
        done = subprocess.run([python, *words], cwd=ROOT, env=settings, capture_output=True, text=True)
        print(done.stdout[-4000:] if done.returncode else done.stdout[-200:], flush=True)
        return done

    report = python.parents[1] / "tests.xml"
    files = [f"tests/test_{name}.py" for name in names]
    marks = "not slow and not notebooks and not clients"
    tests = run("-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", *files)
    suite = next(ElementTree.parse(report).iter("testsuite")).attrib
    skipped, failed = int(suite["skipped"]), int(suite["failures"]) + int(suite["errors"])
    fuzz = run("-m", "tests.fuzz", "--cases", str(cases))
    fuzzed = re.search(r"\d+ cases? failed", fuzz.stdout)
    drafts = run("tests/versions.py", "--drafts")
    exact = drafts.stdout.count("exact")
    return Row(
        *installed(python),
        f"{int(suite['tests']) - skipped - failed} passed, {skipped} skipped, {failed} failed",
        f"{cases} cases, {fuzzed[0].replace(' cases', '') if fuzzed else 'stopped'}",
        exact,
        bool(tests.returncode or fuzz.returncode or drafts.returncode),
    )


def draft() -> int:
    """Print for each of `DRAFTS` whether its text is plain `generate`'s. Returns 1 where it is not, or nothing was accepted."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assisted import AssistedModelForCausalLM, zoo

    folder = str(zoo.folder("target"))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "def mean(values):\n    return sum(values) / len(values)\n\ndef mean_of_squares(values):\n"
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    settings = {"max_new_tokens": 48, "do_sample": False}
    wanted, exact = plain.generate(**inputs, **settings), 0
    for name in DRAFTS:
        spec = name.split(",") if "," in name else name
        pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=spec, draft_length=3, dtype=torch.float32)
        same = torch.equal(pair.generate(**inputs, **settings), wanted) and pair.report.accepted > 0
        print(name, "exact" if same else f"differs, or nothing was accepted: {pair.report}")
        exact += same
    return int(exact < len(DRAFTS) or not _hybrid_is_drafted_for(settings))


def _hybrid_is_drafted_for(settings: dict[str, Any]) -> bool:
    """Whether the shipped hybrid has plain `generate`'s text with drafts of its own head; True where hybrids are refused."""
    import torch

    from assisted import AssistedModelForCausalLM
    from assisted.engine.libraries import STATE_LAYERS

    if not STATE_LAYERS:
        return True
    pair = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft="mtp", draft_length=3, dtype=torch.float32)
    inputs = pair.tokenizer("def mean(values):\n    return sum(values) / len(values)\n", return_tensors="pt")
    wrote, report = pair.generate(**inputs, **settings), pair.report
    same = torch.equal(wrote, pair.target.generate(**inputs, **settings)) and report.accepted > 0
    print("the hybrid:", "drafted for" if same else f"differs, or nothing was accepted: {report}")
    return same


def table(rows: list[Row]) -> str:
    lines = ["| transformers | torch | Python | Quick tests | Fuzzer | Exact drafts |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.transformers} | {row.torch} | {row.python} | {row.tests} | {row.fuzzed} | {row.exact} of {len(DRAFTS)} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=VERSIONS, metavar="VERSION", help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--cases", type=int, default=40, help="of the fuzzer (default: %(default)s)")
    parser.add_argument("--few", action="store_true", help="run fewer tests, for continuous integration")
    parser.add_argument("--page", type=Path, help="the page whose table is written")
    parser.add_argument("--drafts", action="store_true", help="compare ten drafts in this environment, and stop")
    args = parser.parse_args()
    if args.drafts:
        return draft()
    rows: list[Row] = []
    for wanted in args.only:
        python = environment(wanted)
        if installed(python)[0] not in {row.transformers for row in rows}:  # there may be no pre-release
            rows.append(tried(python, FEW if args.few else QUICK, args.cases))
    print(table(rows))
    if args.page is not None:
        written, count = BLOCK.subn(lambda _: f"\n{table(rows)}\n", args.page.read_text(encoding="utf-8"))
        assert count == 1, f"{args.page} has no place for the table"
        args.page.write_text(written, encoding="utf-8")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
