"""Report and Recorder: counts, ratios, totals, and how they are shown."""

import dataclasses
import json

import pytest
from pairs import pair, prompt

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Round
from assisted.core.report import Recorder, Report


def recorded():
    """Two rows: a round that drafts 3 and 1, a plain one, and one with a single row left."""
    recorder = Recorder(row_tokens=[6, 4], seconds=4.0)
    recorder.see(Round.counted([(3, 2, 3), (1, 1, 2)], 0.5, 1.0))  # drafted, accepted, kept
    recorder.see(Round.counted([(0, 0, 1), (0, 0, 1)], 0.25, 0.75, asked=False))
    recorder.see(Round.counted([(2, 0, 1)], 0.125, 0.5))
    return recorder


def test_counts():
    recorder = recorded()
    recorder.prompt_seconds = 0.25
    report = recorder.report()
    assert report.prompt_seconds == 0.25
    assert report.new_tokens == 10
    assert report.target_passes == 5  # a row and a round each
    assert (report.drafted, report.accepted) == (6, 3)
    # drafted first 3 times, second 2, third once; accepted 2, 1, 0
    assert report.acceptance_by_position == (2 / 3, 1 / 2, 0.0)
    assert (report.seconds, report.draft_seconds, report.verify_seconds) == (4.0, 0.875, 2.25)
    assert report.plain_seconds_per_token == 0.375  # 0.75 s for two tokens
    assert report.assisted_share == 6 / 8
    assert report.row_tokens == (6, 4)


def test_a_tree_is_counted_by_its_levels():
    """Nine nodes in three levels, of which two were right: three positions, not nine."""
    recorder = Recorder()
    recorder.see(dataclasses.replace(Round.counted([(9, 2, 3)]), depths=[3]))
    report = recorder.report()
    assert (report.drafted, report.accepted) == (9, 2)
    assert report.acceptance_by_position == (1.0, 1.0, 0.0)


def test_rows_that_ended_are_not_counted():
    recorder = Recorder()
    recorder.see(dataclasses.replace(Round.counted([(3, 2, 3), (3, 0, 3)]), unfinished=[0]))
    assert (recorder.target_passes, recorder.drafted, recorder.tokens) == (1, 3, 3)


def test_every_round_is_shown_to_who_watches():
    seen = []
    rounds = [Round.counted([(1, 1, 2)]), Round.counted([(0, 0, 1)])]
    recorder = Recorder(seen.append)
    for one in rounds:
        recorder.see(one)
    assert seen == rounds


def test_ratios():
    report = recorded().report()
    assert report.tokens_per_pass == 8 / 5  # the first token of each row came with the prompt
    assert report.acceptance_rate == 3 / 6


def test_nothing_recorded():
    report = Recorder().report()
    assert report == Report()
    assert (report.tokens_per_pass, report.acceptance_rate) == (0.0, 0.0)
    assert report.plain_seconds_per_token is None
    assert "0 new tokens" in str(report)


def test_a_round_that_drafts_for_one_row_only_is_assisted():
    recorder = Recorder()
    recorder.see(Round.counted([(0, 0, 1), (2, 2, 3)], 1.0, 1.0))
    assert recorder.report().assisted_share == 1.0
    assert recorder.report().plain_seconds_per_token is None


def test_a_draft_that_came_to_nothing_is_assisted_and_a_plain_pass():
    recorder = Recorder()
    recorder.see(Round.counted([(0, 0, 1)], 1.0, 0.5))
    recorder.see(Round.counted([(0, 0, 1)], 0.0, 0.75, asked=False))
    assert recorder.report().assisted_share == 0.5
    assert recorder.report().plain_seconds_per_token == 0.625
    assert recorder.report().draft_seconds == 1.0


def test_totals_add():
    """Merged counts are those of all rounds in one call, whichever drafted deeper."""
    other = Recorder(row_tokens=[5], seconds=1.0, prompt_seconds=0.5)
    other.see(Round.counted([(5, 4, 5)], 0.25, 0.25))
    merged = [Recorder(), Recorder()]
    for total, parts in zip(merged, ([recorded(), other], [other, recorded()]), strict=True):
        for part in parts:
            total.add(part)
    for total in merged:
        report = total.report()
        assert report.prompt_seconds == 0.5
        assert report.new_tokens == 15
        assert report.target_passes == 6
        assert (report.drafted, report.accepted) == (11, 7)
        assert report.acceptance_by_position == (3 / 4, 2 / 3, 1 / 2, 1.0, 0.0)
        assert (report.seconds, report.draft_seconds, report.verify_seconds) == (5.0, 1.125, 2.5)
        assert report.plain_seconds_per_token == 0.375
        assert report.assisted_share == 11 / 13
        assert report.tokens_per_pass == 12 / 6
    assert merged[0].report().row_tokens == (6, 4, 5)
    assert other.drafted_at == [1, 1, 1, 1, 1]  # a part stays as it was
    assert other.row_tokens == [5]


def test_warnings():
    total, first, second = Recorder(), Recorder(warnings=["a", "b"]), Recorder(warnings=["b", "c"])
    total.add(first)
    total.add(second)
    assert total.report().warnings == ("a", "b", "c")
    assert first.report().warnings == first.report().to_dict()["warnings"] == ("a", "b")
    assert str(first.report()).splitlines()[-2:] == ["warning: a", "warning: b"]


def test_adding_to_a_total_leaves_earlier_reports_alone():
    total = recorded()
    before = total.report()
    values = before.to_dict()
    total.add(recorded())
    assert before.to_dict() == values
    assert total.report().new_tokens == 2 * before.new_tokens


def test_text():
    timed = {"prompt_seconds": 0.25, "once_seconds": 0.5, "predicted_speedup": 1.25}
    text = str(dataclasses.replace(recorded().report(), **timed))
    assert text.splitlines() == [
        "10 new tokens in 4.00 s (2.5 tokens/s)",
        "5 target passes, 1.60 tokens per pass",
        "3 of 6 drafted tokens accepted (50%)",
        "by position: 67% 50% 0%",
        "time: 0.25 s reading the prompt, 0.88 s drafting, 2.00 s verifying, 0.50 s one-time work, 0.38 s other",
        "predicted speedup over no draft 1.25",
        "75% of the tokens were generated with drafting enabled",
    ]


def test_every_second_of_a_call_has_a_name():
    model = AssistedModelForCausalLM.from_models(pair()[0], draft="suffix")
    for _ in range(2):
        model.generate(prompt()["ids"], max_new_tokens=8, do_sample=False)
        list(model.generate_many([prompt()["ids"][0]] * 3, rows=2, max_new_tokens=8, do_sample=False))
        report = model.report
        parts = report.draft_seconds, report.verify_seconds, report.once_seconds, report.other_seconds
        assert min(parts) > 0 and sum(parts) == pytest.approx(report.seconds)
        assert 0 < report.prompt_seconds < report.verify_seconds


def test_text_leaves_out_what_there_is_not():
    text = str(Report(new_tokens=1, seconds=1.0, row_tokens=(1,), assisted_share=1.0))
    assert len(text.splitlines()) == 3
    assert "position" not in text and "time" not in text
    assert "0.00 s drafting, 0.50 s verifying" in str(Report(new_tokens=1, seconds=1.0, verify_seconds=0.5))
    assert "None" not in text


def test_to_dict_is_ready_for_json():
    report = recorded().report()
    values = json.loads(json.dumps(report.to_dict()))
    names = {field.name for field in dataclasses.fields(Report)}
    assert set(values) == names | {"tokens_per_pass", "acceptance_rate"}
    assert values["row_tokens"] == [6, 4]
    assert values["tokens_per_pass"] == report.tokens_per_pass
    assert values["acceptance_rate"] == report.acceptance_rate
    assert values["predicted_speedup"] is None


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recorded().report().accepted = 1
