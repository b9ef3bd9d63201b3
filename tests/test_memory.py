"""Memory over many calls: the script that draws the curve, run for a while."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "memory.py"


@pytest.mark.slow
def test_memory_reaches_a_plateau():
    command = [sys.executable, str(SCRIPT), "--way", "auto", "--threads", "1", "--calls", "600"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    curve = json.loads(printed.splitlines()[-1])
    assert curve[-1] < 1.06 * curve[len(curve) // 2]
