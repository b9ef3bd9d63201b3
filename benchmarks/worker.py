"""Runs a function of this folder in a process of its own: `Worker` in shared.py starts it, perhaps in another interpreter.

    python worker.py MODULE FUNCTION THREADS

Lines of JSON come in: first the function's arguments. If it returns a function, every later line has arguments for that one.
Answers go out, one a line. What libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, function, threads = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent.parent))  # after PYTHONPATH, which may name another version
    if int(threads):
        with suppress(ImportError):  # an interpreter without torch
            import torch

            torch.set_num_threads(int(threads))
    found = getattr(importlib.import_module(module), function)(*json.loads(sys.stdin.readline()))
    if not callable(found):
        print(json.dumps(found), file=answers, flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(found(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
