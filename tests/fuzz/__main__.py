"""`python -m tests.fuzz`: run cases until a time, a number of cases or a number of tokens is reached, and say what differed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
