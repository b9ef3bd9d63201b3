"""Python code in a process of its own, forked from one that has imported torch and transformers but nothing of this package."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import textwrap
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.generation.utils", "transformers.models.llama.modeling_llama"])


def begun(code: str, *args: Any, **variables: str) -> Any:
    """A process that runs code, which finds the arguments in sys.argv. variables: of its environment."""
    process = CONTEXT.Process(target=_run, args=(textwrap.dedent(code), list(map(str, args)), variables))
    process.start()
    return process


def run(code: str, *args: Any, **variables: str) -> CompletedProcess[str]:
    """The same, until it ends; what it prints and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        kept = f"import os\nfor number, file in enumerate({[str(file) for file in files]}, 1):\n"
        kept += "    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)\n"
        process = begun(kept + textwrap.dedent(code), *args, **variables)
        process.join()
        return CompletedProcess(code, process.exitcode or 0, *(file.read_text(encoding="utf-8") for file in files))


def _run(code: str, args: list[str], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    sys.argv[1:] = args
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
