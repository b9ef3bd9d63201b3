"""What to run first where a card is at hand: `python benchmarks/run.py gpu`, with the same options."""

import runpy
import sys
from pathlib import Path

sys.argv[1:1] = ["gpu"]
runpy.run_path(str(Path(__file__).with_name("run.py")), run_name="__main__")
