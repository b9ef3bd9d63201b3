"""Several drafters for one target: who drafts, what is learned, what one that fails costs."""

from dataclasses import replace

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME, CALL, prompt, tokenizer

from assisted import AssistedModelForCausalLM, Combined, DraftModel, Eagle, Merged, QuantizedSelf
from assisted.core.drafts import Draft, DraftingStopped, Round
from assisted.engine.prepared import CallSettings
from assisted.lengths import Fixed
from assisted.methods import parse, read
from assisted.methods.combined import CombinedDrafting, CombinedLength, Member
from assisted.methods.shared.base import Drafting

pytestmark = pytest.mark.usefixtures("invariants")


class OneRow:
    """As much of a text as a drafter that only counts looks at."""

    rows = 1
    unfinished = (0,)
    ids = torch.zeros(1, 4, dtype=torch.int64)


class Chain(Drafting):
    """Proposes the same chain every round; says what it expects of it if it knows."""

    def __init__(self, tokens, expected=None, seconds=0.0, error=None):
        self.tokens, self.seconds, self.error = tokens, seconds, error
        self.asked = self.seen = 0
        self.observe_error = None
        self.expected = expected

    def propose(self, text, budget):
        self.asked += 1
        if self.error:
            raise self.error
        tokens = torch.tensor([self.tokens[:budget]], dtype=torch.int64)
        return Draft(tokens, torch.tensor([tokens.shape[1]]), expected=self.expected)

    def observe(self, round):
        self.seen += 1
        if self.observe_error:
            raise self.observe_error


def combined(*chains):
    """The length and the drafting of a call."""
    length = CombinedLength([Member(Fixed(8).start()) for _ in chains])
    return length, CombinedDrafting(length.members, chains, CallSettings())


def rounds(both, accepted, count=1, verify_seconds=1.0):
    """Propose and judge `count` times; accepted: of a proposed width. Returns the widths proposed."""
    length, drafting = both
    widths = []
    for _ in range(count):
        draft = drafting.propose(OneRow(), length.budget([0]))
        taken = accepted(draft.width)
        seconds = drafting.draftings[draft.member[0]].seconds if draft.member else 0.0
        counted = Round.counted([(draft.width, taken, taken + 1)], seconds, verify_seconds)
        round = replace(counted, draft=draft)
        drafting.observe(round)
        length.observe(round)
        widths.append(draft.width)
    return widths


def test_a_plus_combines(tmp_path, monkeypatch) -> None:
    assert parse("suffix+self:int8") == parse(["suffix", "self:int8"])
    assert parse("self:int8+some/where", "nf4") == parse(["self:int8", "some/where"], "nf4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a+b").mkdir()
    (tmp_path / "draft").mkdir()  # has nothing to do with zoo:draft
    assert parse("suffix+zoo:draft") == parse(["suffix", "zoo:draft"])
    assert parse("a+b") == DraftModel("a+b")
    assert parse(f"eagle:{tmp_path}/a+b") == Eagle(f"{tmp_path}/a+b")
    with pytest.raises(ValueError, match="draft: 'suffix\\+' names"):
        parse("suffix+")


def test_a_confident_copy_goes_first_and_the_model_is_not_asked():
    copy, model = Chain([1] * 6, expected=5.0), Chain([2] * 3)
    assert rounds(combined(copy, model), lambda width: width, 3) == [6, 6, 6]
    assert (copy.asked, model.asked) == (3, 0)
    assert model.seen == 3  # it still hears of every round


def test_a_doubtful_copy_leaves_the_draft_to_the_model():
    copy, model = Chain([1] * 6, expected=0.5), Chain([2] * 3)
    assert rounds(combined(copy, model), lambda width: width, 2) == [3, 3]


def test_a_copy_is_tried_although_its_first_drafts_are_short():
    """The default length gives a drafter two tokens until its costs are measured, which it expects to be accepted in part."""
    copy, model = Chain([1] * 2, expected=1.7), Chain([2] * 6, seconds=0.1)
    both = combined(copy, model)
    assert rounds(both, lambda width: width, 3) == [6] * 3  # with more room, this would be too little
    both[0].members[0].length = Fixed(2).start()
    assert rounds(both, lambda width: width, 1) == [2]


def test_an_estimate_that_comes_out_wrong_is_corrected():
    copy, model = Chain([1] * 6, expected=5.0), Chain([2] * 3, seconds=0.2)
    drafting = combined(copy, model)
    accepted = lambda width: 0 if width == 6 else 3  # noqa: E731
    widths = rounds(drafting, accepted, 3)
    copy.expected = 0.1  # for a while it has nothing to offer: the model gets measured
    widths += rounds(drafting, accepted, 4)
    copy.expected = 5.0
    assert rounds(drafting, accepted, 5) == [3] * 5
    assert widths == [6] * 3 + [3] * 4


def test_a_copy_wins_where_the_model_is_slow():
    copy, model = Chain([1] * 3, expected=3.0), Chain([2] * 4, seconds=5.0)
    drafting = combined(copy, model)
    everything = lambda width: width  # noqa: E731
    rounds(drafting, everything, 3)
    copy.expected = 0.0
    rounds(drafting, everything, 3)
    copy.expected = 3.0
    # 4 tokens in 1 s against 5 tokens in 6 s
    assert rounds(drafting, everything, 3) == [3] * 3


def test_one_that_fails_is_left_out_and_the_last_one_raises():
    good, bad = Chain([2] * 3), Chain([1], expected=5.0, error=RuntimeError("no luck"))
    drafting = combined(bad, good)
    with pytest.warns(UserWarning, match="no luck"):
        assert rounds(drafting, lambda width: width) == [3]
    assert rounds(drafting, lambda width: width) == [3]
    assert bad.asked == 1
    good.error = RuntimeError("none left")
    with pytest.raises(RuntimeError, match="none left"):
        drafting[1].propose(OneRow(), 8)


def test_one_that_fails_to_learn_is_left_out_and_the_last_one_raises():
    bad, good = Chain([1] * 6, expected=5.0), Chain([2] * 3)
    drafting = combined(bad, good)
    bad.observe_error = RuntimeError("no luck")
    with pytest.warns(DraftingStopped, match="Chain failed .*no luck"):
        assert rounds(drafting, lambda width: width) == [6]
    assert rounds(drafting, lambda width: width, 2) == [3, 3]
    assert (bad.seen, good.seen) == (1, 3)
    good.observe_error = RuntimeError("none left")
    with pytest.raises(RuntimeError, match="none left"):
        rounds(drafting, lambda width: width)


@pytest.mark.parametrize("which", ["propose", "observe"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_call_goes_on_with_the_member_that_has_not_failed(number, which, monkeypatch):
    target, model = pair(lambda target: ["suffix", half_right(target)])
    start = CombinedDrafting.__init__

    def spoiled(self, members, draftings, *others):
        start(self, members, draftings, *others)

        def fail(*args):
            raise RuntimeError("no luck")

        monkeypatch.setattr(draftings[number], which, fail)

    monkeypatch.setattr(CombinedDrafting, "__init__", spoiled)
    ids = prompt()["ids"].repeat(1, 2)
    with pytest.warns(DraftingStopped) as caught:
        ours = model.generate(ids, **CALL)
    assert ["continuing with the others" in str(warning.message) for warning in caught] == [True]
    assert model.report.warnings == (str(caught[0].message),)
    assert ours.tolist() == target.generate(ids, **CALL).tolist()
    assert model.report.assisted_share > 0.5 and model.report.drafted > 0


def pair(draft, name="llama"):
    target = build(BY_NAME[name])
    return target, AssistedModelForCausalLM.from_models(target, draft=draft(target), draft_length=4)


def test_a_list_is_a_combination():
    spec = parse(["self:int8", "some/where"], "nf4")
    assert spec == Combined((QuantizedSelf("int8"), DraftModel("some/where", "nf4")))
    with pytest.raises(ValueError, match="at least two"):
        parse(["some/where"])
    with pytest.raises(ValueError, match="draft_quantization"):
        parse(["self:int8", "self:nf4"], "nf4")


def test_a_spec_of_several_is_written_and_read(tmp_path):
    spec = Combined((QuantizedSelf("int8"), Merged((DraftModel("./a"), DraftModel("./b", "nf4")))))
    fields = spec.written("draft")
    assert read(fields, tmp_path) == Combined(
        (
            QuantizedSelf("int8"),
            Merged((DraftModel(str(tmp_path / "draft-1-0")), DraftModel(str(tmp_path / "draft-1-1"), "nf4"))),
        )
    )


def test_a_pair_of_several_is_saved_with_its_models(tmp_path):
    target, model = pair(lambda target: [half_right(target), build(BY_NAME["llama"], seed=5)])
    model.tokenizer = tokenizer()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"target", "draft-0", "draft-1"}
    again = AssistedModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(target, 1, 12, seed=3)
    assert again.generate(ids, **CALL).tolist() == model.generate(ids, **CALL).tolist()
    assert again.report.drafted == model.report.drafted
    assert len(again.drafter.modules) == 2
