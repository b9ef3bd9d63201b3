"""The page "Works with": which programs a pair was tried in, in which version, and what came of it.

    python tests/works_with.py JUNIT.xml PAGE.md

Reads what pytest wrote on tests/test_clients.py, and the docstrings of the tests there.
"""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).with_name("test_clients.py")
PACKAGES = {"transformers serve": "transformers"}  # of a client that is part of one
PAGE = """# Works with

A pair is a `PreTrainedModel`: other programs take it for its target. Each was run with the shipped pair and with the target alone, and the results were
compared: the same text, token for token, and drafts that were used.

<!-- written by `make clients-check` out of tests/test_clients.py -->

{table}

Tried with transformers {transformers}, torch {torch} and Python {python}.

## How to put a pair in

- **A program that takes a model object** gets the pair: `HFLM(pretrained=pair)`, `outlines.from_transformers(pair, tokenizer)`, `pipeline(model=pair)`,
  `GRPOTrainer(model=pair)`, `get_peft_model(pair, config)`.
- **A program that takes a path** gets the folder of a [saved pair](../howto/save-and-push.md), and `trust_remote_code=True` where it does not import `assisted`.

## A server

The server is transformers' own. A saved pair is served as any model is:

```bash
pip install "transformers[serving]"
transformers serve my-pair --trust-remote-code
```

It speaks OpenAI's chat protocol under `http://localhost:8000/v1`, streamed or not. Without `--continuous-batching` it answers one request after the other, with
drafts; with it, requests share plain forward passes.

## Training

A Trainer sees the target's `forward` and its weights under their own names. Its checkpoints are saved pairs, from which `resume_from_checkpoint` and
`from_pretrained` both read. Adapters go into the target alone, never into the draft.

Between two steps a pair writes what the weights as they are would write. Drafts from the text (`"suffix"`, `"ngram"`) and from the target's own layers
(`"early-exit"`, `"layer-skip"`) follow the weights. A draft model and a quantized copy stay as they were made: as the target moves away from them, fewer of
their tokens are accepted, and the text is still the target's.
"""


def tests() -> list[tuple[str, str, str]]:
    """The name, client and docstring of every test, in order."""
    found = []
    for node in ast.parse(TESTS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            (client,) = (
                ast.literal_eval(call.args[0])
                for call in node.decorator_list
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "client"
            )
            found.append((node.name, client, " ".join((ast.get_docstring(node) or "").split())))
    return found


def outcomes(report: Path) -> dict[str, str]:
    """What became of each test in pytest's JUnit report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        found[case.attrib["name"]] = "fails" if failed else "not run" if "skipped" in kinds else "passes"
    return found


def installed(client: str) -> str:
    try:
        return version(PACKAGES.get(client, client))
    except PackageNotFoundError:
        return "not installed"


def table(results: dict[str, str]) -> str:
    rows = ["| Client | Version | What was checked | Result |", "|---|---|---|---|"]
    rows += [
        f"| {client} | {installed(client)} | {checked} | {results.get(name, 'not run')} |"
        for name, client, checked in tests()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    report, page = map(Path, sys.argv[1:])
    page.write_text(
        PAGE.format(
            table=table(outcomes(report)),
            transformers=version("transformers"),
            torch=version("torch"),
            python=".".join(map(str, sys.version_info[:2])),
        ),
        encoding="utf-8",
    )
