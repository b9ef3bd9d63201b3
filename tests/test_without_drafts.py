"""Calls that decode without drafts say so, and the report is theirs; the counts of a call can be read while it runs."""

from __future__ import annotations

import html
import threading
from typing import Any

import pytest
import torch
import transformers.generation.configuration_utils as configuration_utils
from pairs import no_fallback

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.core.report import Report

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
CALL: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model() -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", draft_length=4)


def one_call(model: AssistedModelForCausalLM) -> list[int]:
    """An assisted call, whose report must not outlive the next call."""
    output = model.generate(torch.tensor(PROMPTS[:1]), **CALL)
    assert isinstance(output, torch.Tensor) and model.report is not None and model.report.drafted > 0
    return output[0, len(PROMPTS[0]) :].tolist()


# by default, slots for most of the machine's memory are filled with zeros; older versions have no such settings
settings_of_batches = getattr(configuration_utils, "ContinuousBatchingConfig", None)
FEW_SLOTS = (
    {}
    if settings_of_batches is None
    else {"continuous_batching_config": settings_of_batches(num_blocks=8, max_batch_tokens=64)}
)


def test_a_batch_of_requests_warns_once_and_has_a_report_of_its_own(model: AssistedModelForCausalLM) -> None:
    wanted = one_call(model)
    model.generation_config.eos_token_id = -1
    with pytest.warns(DraftingStopped, match="continuous batching"):
        results = model.generate_batch(PROMPTS, max_new_tokens=8, **FEW_SLOTS)
    assert next(iter(results.values())).generated_tokens == wanted
    assert model.report is not None
    assert (model.report.new_tokens, model.report.row_tokens) == (16, (8, 8))
    assert (model.report.drafted, model.report.target_passes, model.report.assisted_share) == (0, 14, 0.0)
    assert model.totals.new_tokens == 24
    with no_fallback(DraftingStopped):
        model.generate_batch(PROMPTS[:1], max_new_tokens=2, **FEW_SLOTS)


@pytest.mark.parametrize("name", ["init_continuous_batching", "continuous_batching_context_manager"])
def test_a_manager_of_requests_warns_and_leaves_no_report_of_the_call_before(
    name: str, model: AssistedModelForCausalLM
) -> None:
    one_call(model)
    with pytest.warns(DraftingStopped, match="continuous batching"):
        getattr(model, name)()
    assert model.report is not None and model.report.way == "plain"
    assert model.report == Report(way="plain", because=model.report.because)


def test_training_mode_says_what_to_call(model: AssistedModelForCausalLM) -> None:
    model.train()
    model.activation_checkpointing_enable()
    with pytest.warns(DraftingStopped, match=r"model\.eval\(\)"):
        model.generate(torch.tensor(PROMPTS[:1]), **CALL)
    model.eval()
    with no_fallback(DraftingStopped):
        one_call(model)


def test_counts_can_be_read_while_a_call_streams(model: AssistedModelForCausalLM) -> None:
    seen: list[Report | None] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            reader = threading.Thread(target=lambda: seen.append(model.running))
            reader.start()
            reader.join()

        def end(self) -> None:
            pass

    assert model.running is None
    model.generate(torch.tensor(PROMPTS[:1]), **CALL, streamer=Streamer())
    assert model.running is None and model.report is not None
    counts = [report.new_tokens for report in seen if report is not None]
    assert len(counts) == len(seen) and counts == sorted(counts) and counts[-1] > counts[1]
    assert seen[-1] is not None and seen[-1].drafted > 0 and seen[-1].seconds > 0


def test_no_counts_are_left_of_a_call_that_failed(model: AssistedModelForCausalLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), **CALL)
    assert model.running is None


def test_a_report_reads_as_text_and_as_a_table(model: AssistedModelForCausalLM) -> None:
    one_call(model)
    report = model.report
    assert report is not None and repr(report) == str(report)
    shown = report._repr_html_()
    for line in str(report).splitlines():
        for part in html.escape(line).split(": ", 1):
            assert part in shown
