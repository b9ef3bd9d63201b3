"""Drafts that are continued from the text: what is added to which chains, and that it changes no token."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from architectures import half_right
from covering import in_turns
from hypothesis import given
from hypothesis import strategies as st
from medusa_heads import random_heads
from pairs import CALL, ENDS, pair, prompt
from test_ngram import text_of
from test_sampling import SETTINGS, VOCABULARY, require_distribution, tiny
from test_suffix import followers, followers_in_tree, tree_of

from assisted import AssistedModelForCausalLM, Combined, DraftModel, Medusa, NGram, Suffix
from assisted.core.drafts import Draft, Round
from assisted.engine.prepared import CallSettings
from assisted.lengths import Confidence, Costs
from assisted.methods import parse, read
from assisted.methods.combined import CombinedDrafting, CombinedLength, Member, of_continued
from assisted.methods.ngram import NGramDrafting
from assisted.methods.shared.base import Drafting
from assisted.methods.suffix.draft import SuffixDrafter, SuffixDrafting

pytestmark = pytest.mark.usefixtures("invariants")

LOOKUPS = {
    "suffix": lambda call: SuffixDrafting(SuffixDrafter(Suffix()), call),
    "ngram": lambda call: NGramDrafting(NGram(), call),
}


def chain(*rows, q=None):
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[9] * (width - len(row))] for row in rows])
    return Draft(tokens, torch.tensor([len(row) for row in rows]), q)


@pytest.fixture(params=LOOKUPS)
def lookup(request):
    call = SimpleNamespace(attention_mask=None, encoded=None, target=SimpleNamespace(masks=SimpleNamespace(trees=True)))
    return LOOKUPS[request.param](call)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.lists(st.integers(0, 2), max_size=6), st.integers(2, 7))
def test_drafted_tokens_are_followed_where_the_text_has_them(text, drafted, depth):
    tree = tree_of(text, depth=depth)
    points = tree.after(tree.points, drafted)
    whole = [*text, *drafted]
    known = [m for m in range(1, min(depth, len(whole) + 1)) if followers([text], whole[-m:])]
    assert len(points) >= len(known)  # one that ends where the text does may be among them
    found = [set(followers_in_tree(tree, point)) for point in points if point[0].start + point[1] < len(text)]
    assert found == [set(followers([text], whole[-m:])) for m in reversed(known)]


def test_a_chain_is_continued_as_the_text_went_on(lookup):
    text = text_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], limit=40)
    filled = lookup.fill(text, chain([3, 4]), 6)
    assert filled.tokens.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert filled.lengths.tolist() == [6]
    assert (filled.q, filled.parents) == (None, None)
    assert filled.continued.tokens.tolist() == [[3, 4]]


def test_a_copy_goes_on_with_the_drafted_tokens(lookup):
    text = text_of([1, 2, 3, 1, 2, 3, 1, 2], limit=40)
    assert lookup.fill(text, chain([3, 1]), 7).tokens.tolist() == [[3, 1, 2, 3, 1, 2, 3]]


def test_the_budget_and_the_texts_end_limit_the_whole(lookup):
    text = text_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], limit=15)
    assert lookup.fill(text, chain([3, 4]), 3).lengths.tolist() == [3]
    assert lookup.fill(text, chain([3, 4]), 8).lengths.tolist() == [4]  # the fifth token is the target's
    full = chain([3, 4])
    assert lookup.fill(text, full, 2) is full


def test_rows_are_continued_by_themselves_with_a_one_hot_q(lookup):
    text = text_of([1, 2, 3, 4, 5, 1, 2], [5, 6, 7, 8, 9, 5, 6], [0, 1, 2, 3, 4, 5, 6], limit=40)
    text.ended[2] = True
    q = torch.rand(3, 2, 10)
    filled = lookup.fill(text, chain([3], [7, 8], [1], q=q), 3)
    assert [row[:count] for row, count in zip(filled.tokens.tolist(), filled.lengths, strict=True)] == [
        [3, 4, 5],
        [7, 8, 9],
        [1],
    ]
    assert torch.equal(filled.q[0, :1], q[0, :1])
    assert torch.equal(filled.q[1, :2], q[1])
    assert filled.q[0, 1:].argmax(-1).tolist() == [4, 5]
    assert filled.q[1, 2].tolist() == [0.0] * 9 + [1.0]


def test_trees_and_what_nothing_follows_stay_as_they_are(lookup):
    text = text_of([1, 2, 3, 4, 1, 2], limit=40)
    tree = Draft(torch.tensor([[3, 3]]), torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
    unknown = chain([8, 9])
    assert lookup.fill(text, tree, 8) is tree
    assert lookup.fill(text, unknown, 8) is unknown


def test_less_is_added_after_misses_and_everything_again_after_a_hit(lookup, monkeypatch):
    text = text_of([1, 2], limit=200)
    monkeypatch.setattr(lookup, "look_up_after", lambda row, drafted, budget: [7] * budget)
    widths = []
    for came in ([3, 0], [3, 0], [3, 0], [8], [5, 0], [3], [3, 7], [3]):
        widths.append(lookup.fill(text, chain([3]), 9).width)
        text.extend([came], None, None)
    # nothing is known about what was added to a chain that was rejected, or after which nothing came
    assert widths == [9, 5, 3, 1, 2, 2, 2, 9]


def test_a_round_as_the_first_drafter_sees_it():
    counted = Round.counted([(5, 4, 5), (4, 1, 2)])
    own = chain([3, 4], [1, 2, 3])
    whole = chain([3, 4, 5, 6, 7], [1, 2, 3, 4])
    round = Round(**{**vars(counted), "draft": Draft(whole.tokens, whole.lengths, continued=own)})
    seen = of_continued(round)
    assert (seen.draft, seen.drafted, seen.depths, seen.accepted) == (own, [2, 3], [2, 3], [2, 1])
    assert seen.kept == [5, 2]
    assert of_continued(counted) is counted


class Seeing(Drafting):
    """A drafter, and its draft length, that keep what they see. It proposes one chain, or adds one token to another's."""

    costs = None

    def __init__(self, tokens=()):
        self.tokens, self.seen = tokens, []

    def propose(self, text, budget):
        return chain(self.tokens) if self.tokens else Draft.empty(1)

    def fill(self, text, draft, budget):
        more = torch.cat([draft.tokens, torch.tensor([[9]])], 1)
        return Draft(more, draft.lengths + 1, continued=draft) if not self.tokens else draft

    def budget(self, unfinished):
        return 8

    def observe(self, round):
        self.seen.append(round)

    observe_other = observe


def test_who_proposed_sees_its_own_part_and_the_others_the_whole():
    draftings, lengths = [Seeing([1, 2]), Seeing(), Seeing()], [Seeing() for _ in range(3)]
    length = CombinedLength([Member(one) for one in lengths])
    combined = CombinedDrafting(length.members, draftings, CallSettings(), {0})
    draft = combined.propose(text_of([1, 2]), length.budget([0]))
    assert (draft.tokens.tolist(), draft.member) == ([[1, 2, 9]], (0,))
    round = replace(Round.counted([(3, 3, 4)]), draft=draft)
    combined.observe(round)
    length.observe(round)
    (first,), (second,), (third,) = (drafting.seen for drafting in draftings)
    assert (first.draft, first.drafted, first.accepted, first.kept) == (draft.continued, [2], [2], [4])
    assert second is third is round
    (first,), (second,), _ = (one.seen for one in lengths)
    assert (first.draft.tokens.tolist(), first.drafted, first.depths, first.accepted) == ([[1, 2]], [3], [2], [2])
    assert second is round  # the costs of a forward pass are those of all its positions
    assert length.members[0].accepted.mean() == 3
    assert (length.members[0].filled.total, length.members[0].filled.weight) == (1, 1)


def test_nothing_is_added_where_it_costs_more_than_it_saves():
    """A round of 1 s commits 2 tokens. What was added is accepted for 2 of 10 positions, as is guessed at first."""
    for position, depth in ((0.09, 6), (0.11, 0)):
        member = Member(SimpleNamespace(costs=Costs(((1, 1.0), (9, 1 + 8 * position)), 0.0)))
        member.learn(1.0, 1.0, 1.0)
        assert member.depth_to_fill(chain([3, 4]), 6) == depth
        member.filled.add(20, 100)
        assert member.depth_to_fill(chain([3, 4]), 6) == depth
    member.filled.add(20, 0)
    assert member.depth_to_fill(chain([3, 4]), 6) == 6


def test_a_draft_that_the_target_has_half_read_is_not_continued():
    target, _ = pair()
    model = AssistedModelForCausalLM.from_models(target, draft=["early-exit", half_right(target), "suffix"])
    assert model.drafter.filled == {1, 2}


class Recorded:
    """The rounds of a call, and what each member saw of them."""

    def __init__(self, monkeypatch):
        self.rounds, observe = [], CombinedDrafting.observe

        def record(drafting, round):
            self.rounds.append(round)
            observe(drafting, round)

        monkeypatch.setattr(CombinedDrafting, "observe", record)

    @property
    def added_and_kept(self):
        """Tokens that were added to chains, and those of them that were accepted."""
        seen = [(round, of_continued(round)) for round in self.rounds if round.draft.continued is not None]
        added = sum(sum(whole.drafted) - sum(own.drafted) for whole, own in seen)
        return added, sum(sum(whole.accepted) - sum(own.accepted) for whole, own in seen)


def heard(target, **processors):
    """What the target writes after the prompt of these tests, every sixth token changed."""
    inputs, kwargs = prompt(rows=3), CALL | processors | {"max_new_tokens": 40}
    text = target.generate(inputs["ids"], attention_mask=inputs["attention_mask"], **kwargs)
    text[:, 5::6] = 3
    return Suffix(corpus=text.tolist())


DRAFTS = {
    "model": lambda target, **kw: (half_right(target), heard(target, **kw)),
    "suffix first": lambda target, **kw: (heard(target, **kw), half_right(target)),
    "nested": lambda target, **kw: ("ngram", Combined((half_right(target), heard(target, **kw)))),
}
UNSURE = Confidence(0.7, 8)  # a half-right model drafts a token or two


@pytest.mark.parametrize(("draft", "processors"), in_turns(list(DRAFTS), [{}, {"repetition_penalty": 1.2}]))
def test_continued_drafts_equal_plain(draft, processors, monkeypatch):
    target, _ = pair()
    spec = Combined(DRAFTS[draft](target, **processors))
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=UNSURE)
    recorded, inputs = Recorded(monkeypatch), prompt(rows=3)
    kwargs = CALL | {"attention_mask": inputs["attention_mask"], "max_new_tokens": 40, "eos_token_id": ENDS[:1]}
    ours = model.generate(inputs["ids"], **kwargs, **processors)
    assert ours.tolist() == target.generate(inputs["ids"], **kwargs, **processors).tolist()
    added, kept = recorded.added_and_kept
    assert 0 < kept < added
    assert all(max(round.drafted) <= 8 for round in recorded.rounds)


def test_the_first_drafter_goes_on_from_its_own_tokens(monkeypatch):
    """After a continued draft it drafts what it drafts alone after the same text."""
    target, _ = pair()
    draft = half_right(target)
    spec = Combined((draft, heard(target)))
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=UNSURE)
    recorded, ids = Recorded(monkeypatch), prompt(rows=2)["ids"]
    text = model.generate(ids, **CALL | {"max_new_tokens": 40})
    read, compared = [ids.shape[1] + 1] * 2, 0
    for round in recorded.rounds:
        own = round.draft.continued or round.draft
        for row in round.unfinished:
            start, count = read[row], int(own.lengths[row]) if round.draft.member[:1] == (0,) else 0
            if count:
                alone = draft.generate(text[row : row + 1, :start], **CALL | {"max_new_tokens": count})
                assert own.tokens[row, :count].tolist() == alone[0, start:].tolist()
                compared += round.draft.continued is not None
            read[row] += round.kept[row]
    assert compared > 5


def test_fill_can_be_switched_off_and_is_saved(tmp_path, monkeypatch):
    target, _ = pair()
    spec = Combined(DRAFTS["model"](target), fill=False)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=UNSURE)
    recorded = Recorded(monkeypatch)
    model.generate(prompt()["ids"], **CALL)
    assert recorded.rounds and recorded.added_and_kept == (0, 0)
    two = ("suffix", DraftModel("./a"))
    for fill in (False, True):
        assert read(Combined(two, fill=fill).written("draft"), tmp_path).fill is fill
    assert read({"method": "combined", "drafters": [part.written("x") for part in map(parse, two)]}, tmp_path).fill


@pytest.mark.parametrize(
    ("setting", "draft"), in_turns(["plain", "top-k", "repetition penalty"], ["without q", "with q"])
)
def test_continued_drafts_follow_the_targets_distribution(draft, setting, monkeypatch):
    target, model = tiny(0), tiny(1)
    first = model if draft == "with q" else Medusa(random_heads(16, VOCABULARY, heads=1), tree=False)
    corpus = [[1, 3, 2, 4, a, b, c, 1, a] for a in range(5) for b in range(5) for c in range(5)]
    spec = Combined((first, Suffix(corpus=corpus, min_probability=0.01)))
    both = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=Confidence(0.7, 3))
    recorded = Recorded(monkeypatch)
    require_distribution(both, 11, new_tokens=4, rows=6000, **SETTINGS[setting])
    added, kept = recorded.added_and_kept
    assert 0 < kept < added
