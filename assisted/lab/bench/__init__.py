"""The measuring protocol: every way of decoding gets the same prompts, tokens and counting. See docs/howto/bench.md."""

from .clock import Bars
from .measure import brief, default_drafts, fastest, load, measure, pad_token, point, transformers_assisted
from .methods import Method, assisted, lookups, of_model, peers, plain
from .prompts import Batch, Prompt, at_length, batches, held_out_prompts, read, short_prompts, sources
from .protocol import Measured, Rules, race, stream
from .results import Point, Result, Row, machine, summed_up
from .statistics import Interval, repeated_share, speedup
from .table import markdown, table

__all__ = [
    "Bars",
    "Batch",
    "Interval",
    "Measured",
    "Method",
    "Point",
    "Prompt",
    "Result",
    "Row",
    "Rules",
    "assisted",
    "at_length",
    "batches",
    "brief",
    "default_drafts",
    "fastest",
    "held_out_prompts",
    "load",
    "lookups",
    "machine",
    "markdown",
    "measure",
    "of_model",
    "pad_token",
    "peers",
    "plain",
    "point",
    "race",
    "read",
    "repeated_share",
    "short_prompts",
    "sources",
    "speedup",
    "stream",
    "summed_up",
    "table",
    "transformers_assisted",
]
