"""Counts of a server in Prometheus' text form, under vLLM's names where they mean the same.

The names are those of https://docs.vllm.ai/en/v0.9.1/usage/metrics.html (vLLM 0.9.1), with the suffix that its Prometheus
client adds to counters; names that begin with "assisted:" are ours. The form is https://prometheus.io/docs/instrumenting/exposition_formats/
(text format 0.0.4).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
_HELP = {
    "vllm:num_requests_running": "requests that are answered now",
    "vllm:num_requests_waiting": "requests that wait for their turn",
    "vllm:request_success_total": "finished answers by their finish reason",
    "vllm:prompt_tokens_total": "tokens of prompts",
    "vllm:generation_tokens_total": "generated tokens",
    "vllm:prefix_cache_queries_total": "tokens of prompts that were looked up in what was read before",
    "vllm:prefix_cache_hits_total": "tokens of prompts that were not read again",
    "vllm:spec_decode_num_draft_tokens_total": "drafted tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "drafted tokens that were accepted",
    "vllm:request_queue_time_seconds": "time until a request's turn",
    "vllm:time_to_first_token_seconds": "time from a request's arrival to its first token",
    "vllm:e2e_request_latency_seconds": "time from a request's arrival to its last token",
    "assisted:requests_total": "requests by their HTTP status",
    "assisted:answers_total": "answers by how they were written, as rows of a batch or alone",
    "assisted:target_passes_total": "forward passes of the target over a row",
    "assisted:draft_seconds_total": "time spent drafting",
    "assisted:verify_seconds_total": "time spent in the target's forward passes over drafts",
}


class Metrics:
    """Counters and histograms of seconds; each may be changed by any thread."""

    def __init__(self, model: str):
        self.model = model
        self.lock = threading.Lock()
        self.counts: dict[str, dict[str, float]] = {name: {"": 0.0} for name in _HELP if name.endswith("total")}
        self.buckets = {name: [0] * (len(_BOUNDS) + 1) for name in _HELP if name.endswith("seconds")}
        self.sums = dict.fromkeys(self.buckets, 0.0)

    def add(self, name: str, more: float, label: str = "") -> None:
        """Count. label: such as 'status="200"'."""
        with self.lock:
            self.counts[name][label] = self.counts[name].get(label, 0.0) + more

    def observe(self, name: str, seconds: float) -> None:
        """Put a time into its histogram."""
        with self.lock:
            self.buckets[name][bisect_left(_BOUNDS, seconds)] += 1
            self.sums[name] += seconds

    def answered(self, usage: Mapping[str, Any], report: Mapping[str, Any], reasons: list[str]) -> None:
        """Count an answer by its usage, its report and the finish reason of each of its texts."""
        for reason in reasons:
            self.add("vllm:request_success_total", 1, f'finished_reason="{reason}"')
        found = {"prompt_tokens": usage["prompt_tokens"], "generation_tokens": usage["completion_tokens"]}
        found |= {"prefix_cache_queries": usage["prompt_tokens"], "prefix_cache_hits": report["cached_tokens"]}
        found |= {"spec_decode_num_draft_tokens": report["drafted"]}
        found |= {"spec_decode_num_accepted_tokens": report["accepted"]}
        for name, more in found.items():
            self.add(f"vllm:{name}_total", more)
        for name in ("target_passes", "draft_seconds", "verify_seconds"):
            self.add(f"assisted:{name}_total", report[name])

    def text(self, running: int, waiting: int) -> str:
        """All of them, and how many requests run and wait now."""
        lines = []
        with self.lock:
            now = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": waiting}
            for name, about in _HELP.items():
                kind = "gauge" if name in now else "histogram" if name in self.buckets else "counter"
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
                if name in self.buckets:
                    total = 0
                    for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.buckets[name], strict=True):
                        total += count
                        lines.append(self._line(f"{name}_bucket", total, f'le="{bound}"'))
                    lines += [self._line(f"{name}_sum", self.sums[name]), self._line(f"{name}_count", total)]
                elif name in now:
                    lines.append(self._line(name, now[name]))
                else:
                    each = self.counts[name]
                    lines += [
                        self._line(name, value, label) for label, value in each.items() if label or len(each) == 1
                    ]
        return "\n".join(lines) + "\n"

    def _line(self, name: str, value: float, label: str = "") -> str:
        model = self.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{model}"' + (f",{label}" if label else "")
        return f"{name}{{{labels}}} {value:.10g}"
