"""Distribution: all nodes of a draft at once get the scores that each real prefix gets alone."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from assisted.core.drafts import Draft
from assisted.distribution import _NOT_YET, _PREFIX_FREE, _PREFIX_READING, Distribution, probabilities

VOCABULARY = 12
LENGTHS = [1, 6, 9]  # committed tokens of each row
WIDTH = 4
EOS = 2

# One of each known class, set so that it has something to do somewhere in a text of 1 to 13 tokens.
KNOWN = {
    hf.EpsilonLogitsWarper: lambda: hf.EpsilonLogitsWarper(0.05),
    hf.EtaLogitsWarper: lambda: hf.EtaLogitsWarper(0.3),
    hf.ExponentialDecayLengthPenalty: lambda: hf.ExponentialDecayLengthPenalty((2, 1.5), EOS, 1),
    hf.ForcedBOSTokenLogitsProcessor: lambda: hf.ForcedBOSTokenLogitsProcessor(5),
    hf.ForcedEOSTokenLogitsProcessor: lambda: hf.ForcedEOSTokenLogitsProcessor(8, EOS),
    hf.InfNanRemoveLogitsProcessor: hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization: hf.LogitNormalization,
    hf.MinLengthLogitsProcessor: lambda: hf.MinLengthLogitsProcessor(8, EOS),
    hf.MinNewTokensLengthLogitsProcessor: lambda: hf.MinNewTokensLengthLogitsProcessor(1, 7, EOS),
    hf.MinPLogitsWarper: lambda: hf.MinPLogitsWarper(0.2),
    hf.NoBadWordsLogitsProcessor: lambda: hf.NoBadWordsLogitsProcessor([[1], [3, 4], [4, 3, 4]]),
    hf.NoRepeatNGramLogitsProcessor: lambda: hf.NoRepeatNGramLogitsProcessor(2),
    hf.RepetitionPenaltyLogitsProcessor: lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    hf.SequenceBiasLogitsProcessor: lambda: hf.SequenceBiasLogitsProcessor([[[1], 2.0], [[3, 4], -3.0]]),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda: hf.SuppressTokensAtBeginLogitsProcessor([1, 7], 6),
    hf.SuppressTokensLogitsProcessor: lambda: hf.SuppressTokensLogitsProcessor([1, 7]),
    hf.TemperatureLogitsWarper: lambda: hf.TemperatureLogitsWarper(0.7),
    hf.TopHLogitsWarper: lambda: hf.TopHLogitsWarper(0.5),
    hf.TopKLogitsWarper: lambda: hf.TopKLogitsWarper(3),
    hf.TopPLogitsWarper: lambda: hf.TopPLogitsWarper(0.7),
    hf.TypicalLogitsWarper: lambda: hf.TypicalLogitsWarper(0.6),
    hf.WhisperTimeStampLogitsProcessor: lambda: hf.WhisperTimeStampLogitsProcessor(
        GenerationConfig(eos_token_id=EOS, no_timestamps_token_id=7, max_initial_timestamp_index=2), 2
    ),
}
SEVERAL = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
)
LISTS = {kind.__name__: (kind,) for kind in KNOWN} | {"several": SEVERAL, "none": ()}

by_class = pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
by_list = pytest.mark.parametrize("kinds", LISTS.values(), ids=LISTS)


class Counting(hf.LogitsProcessor):
    """A processor the library has never met: it counts its calls and writes down what it is shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.tolist())
        return scores + len(self.shown)


class Derived(hf.TemperatureLogitsWarper):
    """Whatever a class adds to a known one is not known."""


def distribution(*kinds, do_sample=True):
    return Distribution(LogitsProcessorList(KNOWN[kind]() for kind in kinds), do_sample)


def committed(seed=0):
    """[B, S] ids of few kinds, so that words repeat; what lies behind a row's length is no part of it."""
    ids = torch.randint(3, 6, (len(LENGTHS), max(LENGTHS) + 3), generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = 7
    return ids


def logits_for(kinds, *shape, seed=0):
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    if hf.InfNanRemoveLogitsProcessor in kinds:
        logits[..., 0], logits[..., 3], logits[..., 5] = torch.inf, torch.nan, -torch.inf
    return logits


def drafted(parents=None, seed=0, width=WIDTH):
    tokens = torch.randint(3, 6, (len(LENGTHS), width), generator=torch.Generator().manual_seed(100 + seed))
    return Draft(tokens, torch.full((len(LENGTHS),), width), parents=parents)


def prefix(ids, draft, row, node):
    return torch.tensor(ids[row, : LENGTHS[row]].tolist() + draft.prefix(row, node))


def alone(kinds, text, logits):
    """One prefix through processors of its own, as plain decoding of this row alone would have it. [V] -> [V]"""
    return LogitsProcessorList(KNOWN[kind]() for kind in kinds)(text[None], logits[None].clone())[0]


def check(kinds, draft, seed=0):
    ids, logits = committed(seed), logits_for(kinds, len(LENGTHS), draft.width + 1, seed=seed)
    given_logits = logits.clone()
    scores = distribution(*kinds).scores(ids, LENGTHS, logits, draft)
    assert scores.dtype == torch.float32
    for row in range(len(LENGTHS)):
        for node in range(-1, draft.width):
            expected = alone(kinds, prefix(ids, draft, row, node), logits[row, node + 1])
            torch.testing.assert_close(scores[row, node + 1], expected, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(logits.nan_to_num(), given_logits.nan_to_num())
    return scores


def test_every_known_class_is_tried():
    assert set(KNOWN) == _PREFIX_FREE | _NOT_YET | _PREFIX_READING
    assert len(KNOWN) == len(_PREFIX_FREE) + len(_NOT_YET) + len(_PREFIX_READING)


@by_list
def test_chains(kinds):
    scores = check(kinds, drafted())
    assert not kinds or not scores.equal(logits_for(kinds, len(LENGTHS), WIDTH + 1))  # they have something to do


@pytest.mark.parametrize("enough", [1, 2, 7, 12, 14, 30])
@pytest.mark.parametrize("of_the_new", [False, True])
def test_a_text_may_not_end_before_it_is_long_enough(of_the_new, enough):
    ends = [EOS, 4, VOCABULARY + 3]  # one that is no token of this vocabulary
    processor = (
        hf.MinNewTokensLengthLogitsProcessor(1, enough - 1, ends)
        if of_the_new
        else hf.MinLengthLogitsProcessor(enough, ends)
    )
    ids, draft, logits = committed(), drafted(), logits_for((), len(LENGTHS), WIDTH + 1)
    scores = Distribution(LogitsProcessorList([processor]), False).scores(ids, LENGTHS, logits, draft)
    for row in range(len(LENGTHS)):
        for node in range(-1, WIDTH):
            expected = processor(prefix(ids, draft, row, node)[None], logits[row, node + 1][None])[0]
            assert torch.equal(scores[row, node + 1], expected)


@by_list
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_trees(kinds, data):
    parents = [[data.draw(st.integers(-1, node - 1)) for node in range(WIDTH)] for _ in LENGTHS]
    seed = data.draw(st.integers(0, 50))
    check(kinds, drafted(torch.tensor(parents), seed), seed)


@by_list
@pytest.mark.parametrize("width", [0, 1, WIDTH])
def test_scores_of_the_last_node_are_the_column_of_all(kinds, width):
    ids, draft = committed(), drafted(width=width)
    logits = logits_for(kinds, len(LENGTHS), width + 1)
    whole = distribution(*kinds).scores(ids, LENGTHS, logits, draft)
    last = distribution(*kinds).scores(ids, LENGTHS, logits[:, -1:], draft, nodes=[draft.width - 1])[:, 0]
    torch.testing.assert_close(last, whole[:, -1], rtol=0, atol=1e-6, equal_nan=True)


@by_list
def test_scores_of_logits_alone(kinds):
    """Only what numbers describe has a key, and it needs neither text nor draft."""
    ids, draft, logits = committed(), drafted(), logits_for(kinds, len(LENGTHS), WIDTH + 1)
    alone = distribution(*kinds)
    if any(kind in _NOT_YET | _PREFIX_READING or kind is hf.SuppressTokensLogitsProcessor for kind in kinds):
        assert alone.of_logits is None
    if alone.of_logits is None:
        return
    assert alone.of_logits == distribution(*kinds).of_logits != distribution(*kinds, hf.TopKLogitsWarper).of_logits
    expected = alone.scores(ids, LENGTHS, logits, draft)
    torch.testing.assert_close(alone.scores_of(logits), expected, rtol=0, atol=1e-6, equal_nan=True)


@by_class
def test_known_classes_are_functions_of_a_row(kind):
    """No memory: asked again, in another order, or about some of the rows, the answer is the same."""
    texts = [committed()[:, :n].roll(n, 1) for n in (1, 3, 6, 8, 9)]
    logits = logits_for((kind,), len(texts), len(LENGTHS), seed=5)
    processor = KNOWN[kind]()
    first = [processor(ids, rows) for ids, rows in zip(texts, logits, strict=True)]
    order = [3, 0, 4, 2, 1]
    again = {n: processor(texts[n], logits[n]) for n in order}
    for n, answer in enumerate(first):
        torch.testing.assert_close(again[n], answer, rtol=0, atol=0, equal_nan=True)
        for rows in ([0], [2], [1, 0], [2, 2]):
            some = processor(texts[n][rows], logits[n][rows])
            torch.testing.assert_close(some, answer[rows], rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", [kind for kind in KNOWN if kind in _PREFIX_FREE], ids=lambda kind: kind.__name__)
def test_prefix_free_classes_read_no_prefix(kind):
    logits = logits_for((kind,), 3)
    answers = [KNOWN[kind]()(ids, logits) for ids in (committed(0), committed(1)[:, :1])]
    torch.testing.assert_close(*answers, rtol=0, atol=0, equal_nan=True)


def by_row():
    """A repetition penalty with a number for each row; transformers has it from 5.23 on."""
    with suppress(ValueError):
        yield hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([1, 2, 3]))


@by_list
def test_known_classes_need_no_order(kinds):
    assert not distribution(*kinds).in_order
    assert tuple(type(processor) for processor in distribution(*kinds).for_draft().processors) == kinds


@pytest.mark.parametrize(
    "unknown",
    [
        Counting(),
        Derived(0.7),
        hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1),
        hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.tensor([[3]])),
        hf.WatermarkLogitsProcessor(VOCABULARY, "cpu"),
        *by_row(),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_anything_else_sees_committed_prefixes_in_order(unknown):
    known = [hf.TemperatureLogitsWarper(0.5), hf.NoRepeatNGramLogitsProcessor(2)]
    mixed = Distribution(LogitsProcessorList([known[0], unknown, known[1]]), True)
    assert mixed.in_order
    left = mixed.for_draft()
    assert not left.in_order
    assert list(left.processors) == known
    assert left.do_sample
    assert len(mixed.processors) == 3


def test_ordered_scores_are_those_of_plain_decoding():
    """Every processor gets the whole batch, once a call, and the model's logits stay as they are."""
    counting = Counting()
    temperature = hf.TemperatureLogitsWarper(0.5)
    ordered = Distribution(LogitsProcessorList([counting, temperature]), False)
    ids = committed()
    for step in (1, 2):
        logits = logits_for((), 3).to(torch.bfloat16 if step == 2 else torch.float32)
        before = logits.clone()
        scores = ordered.ordered_scores(ids[:, :step], logits)
        assert scores.dtype == torch.float32
        assert torch.equal(scores, (before.float() + step) / 0.5)
        assert torch.equal(logits, before)
    assert counting.shown == [ids[:, :1].tolist(), ids[:, :2].tolist()]


def test_a_processor_that_writes_in_place_leaves_the_logits_alone():
    class InPlace(hf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.zero_()

    logits = logits_for((), 3)
    before = logits.clone()
    Distribution(LogitsProcessorList([InPlace()]), False).ordered_scores(committed(), logits)
    assert torch.equal(logits, before)


def test_half_precision_logits_are_judged_in_float32():
    logits = logits_for((), len(LENGTHS), WIDTH + 1).bfloat16()
    scores = distribution(hf.TemperatureLogitsWarper).scores(committed(), LENGTHS, logits, drafted())
    assert torch.equal(scores, logits.float() / 0.7)
    last = distribution(hf.TemperatureLogitsWarper).scores(
        committed(), LENGTHS, logits[:, -1:], drafted(), nodes=[WIDTH - 1]
    )[:, 0]
    assert torch.equal(last, scores[:, -1])


def test_probabilities():
    scores = logits_for((), 2, 3)
    scores[0, 0, 1:] = -torch.inf
    p = probabilities(scores)
    assert torch.allclose(p.sum(-1), torch.ones(2, 3))
    assert p[0, 0].tolist() == [1.0] + [0.0] * (VOCABULARY - 1)
    assert torch.equal(p.argmax(-1), scores.argmax(-1))


WARPERS = {
    "top-p 0.3": lambda: [hf.TopPLogitsWarper(0.3)],
    "top-p 0.5": lambda: [hf.TopPLogitsWarper(0.5)],
    "top-p 0.95": lambda: [hf.TopPLogitsWarper(0.95)],
    "top-p 0.8 of at least 5": lambda: [hf.TopPLogitsWarper(0.8, min_tokens_to_keep=5)],
    "top-p 0.999 of at least 290": lambda: [hf.TopPLogitsWarper(0.999, min_tokens_to_keep=290)],
    "top-k 50": lambda: [hf.TopKLogitsWarper(50)],
    "top-k 50, top-p 0.8": lambda: [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.8)],
    "temperature, top-k 40, top-p 0.95": lambda: [
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(40),
        hf.TopPLogitsWarper(0.95),
    ],
    "top-h": lambda: [hf.TopHLogitsWarper(0.5)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.1, min_tokens_to_keep=3)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.5)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(3e-3)],
    "eta": lambda: [hf.EtaLogitsWarper(3e-3)],
}
LOGITS = {
    "float32": lambda x: x,
    "float16": lambda x: (x + 20).half(),
    "bfloat16": lambda x: (x + 20).bfloat16(),
    "whole numbers": lambda x: x.round().bfloat16(),
    "all equal": lambda x: torch.ones_like(x, dtype=torch.bfloat16),
    "not a number": lambda x: x.bfloat16().index_fill(-1, torch.tensor([3]), torch.nan),
    "infinite": lambda x: x.bfloat16().index_fill(-1, torch.tensor([3]), torch.inf),
    "all forbidden": lambda x: torch.full_like(x, -torch.inf),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
@pytest.mark.parametrize("size", [12, 300, 49_152])
def test_the_same_tokens_are_kept_as_by_the_processors_themselves(size, warpers, logits):
    """Bit for bit, in half precision, too, where several tokens have the same score and only some of them are kept."""
    turn = 2 * [*WARPERS.values()].index(warpers) + [*LOGITS.values()].index(logits)
    for seed in range(3) if size < 1000 else [turn % 3]:
        spread = (1.0, 3.0, 6.0)[seed]
        normal = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
        given_logits = logits(spread * normal)
        own = Distribution(LogitsProcessorList(warpers()), True)
        try:
            expected = [warpers_of(warpers, row) for row in given_logits.flatten(0, 1)]
        except ValueError as error:  # torch.distributions refuses what is no number
            with pytest.raises(ValueError, match=str(error)[:20]):
                own.scores(torch.ones(2, 1), [1, 1], given_logits, drafted(), nodes=[-1, 0, 1])
            continue
        found = own.scores(torch.ones(2, 1), [1, 1], given_logits, drafted(), nodes=[-1, 0, 1])
        assert torch.equal(found.nan_to_num(nan=7.0), torch.cat(expected).view_as(found).nan_to_num(nan=7.0))


def warpers_of(make, row):
    """One row alone through the library's processors, in float32 as `generate` has it. [V] -> [1, V]"""
    return LogitsProcessorList(make())(None, row[None].float())


def test_the_vocabulary_is_not_sorted_for_a_nucleus(monkeypatch):
    scores = 12 * torch.randn(1, 3, 2000, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(hf.TopPLogitsWarper, "__call__", None)
    found = distribution(hf.TopPLogitsWarper).scores(torch.ones(1, 1), [1], scores, drafted(), nodes=[-1, 0, 1])
    assert 1 <= found.isfinite().sum(-1).max() < 256


def test_of_equal_scores_a_draft_keeps_any(monkeypatch):
    """As many as the processor, of which it chooses others, without sorting the vocabulary."""
    scores = (4 * torch.randn(1, 3, 2000, generator=torch.Generator().manual_seed(1))).round()
    own = Distribution(LogitsProcessorList([hf.TopPLogitsWarper(0.95)]), True)
    given = torch.ones(1, 1), [1], scores, drafted()
    expected = own.scores(*given, nodes=[-1, 0, 1])
    assert expected.isfinite().sum(-1).max() < 256
    monkeypatch.setattr(hf.TopPLogitsWarper, "__call__", None)
    with pytest.raises(TypeError):
        own.scores(*given, nodes=[-1, 0, 1])
    found = own.for_draft().scores(*given, nodes=[-1, 0, 1])
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("kind", [hf.TopPLogitsWarper, hf.RepetitionPenaltyLogitsProcessor])
def test_rows_that_have_ended_are_no_work(kind, monkeypatch):
    """They keep their logits; the others get the scores that they have in company."""
    logits = logits_for((), len(LENGTHS), WIDTH + 1)
    raw, own = logits.clone(), distribution(kind)
    expected = own.scores(committed(), LENGTHS, logits, drafted())
    for rows in ([0], [2], [0, 2], [1, 2]):
        found = own.scores(committed(), LENGTHS, logits, drafted(), rows)
        others = [row for row in range(len(LENGTHS)) if row not in rows]
        assert torch.equal(found[rows], expected[rows]) and torch.equal(found[others], raw[others])
    assert torch.equal(logits, raw)
    seen = []
    apply = Distribution._apply
    monkeypatch.setattr(Distribution, "_apply", lambda self, *args: [seen.append(len(args[3])), apply(self, *args)][1])
    own.scores(committed(), LENGTHS, logits, drafted(), [1])
    assert seen == [1]


def test_the_vocabulary_is_sorted_where_a_nucleus_is_wide_alone(monkeypatch):
    """Of a batch of drafts some columns nearly always are unsure: the others do not pay for them."""
    spread = torch.tensor([[12.0, 1.0, 12.0], [1.0, 12.0, 12.0]])[:, :, None]
    scores = spread * torch.randn(2, 3, 2000, generator=torch.Generator().manual_seed(1))
    warper, own, sorted_rows = hf.TopPLogitsWarper(0.95), hf.TopPLogitsWarper.__call__, []
    expected = warper(None, scores.flatten(0, 1)).view_as(scores)
    monkeypatch.setattr(
        hf.TopPLogitsWarper, "__call__", lambda self, ids, s: [sorted_rows.append(len(s)), own(self, ids, s)][1]
    )
    found = Distribution(LogitsProcessorList([warper]), True).scores(
        torch.ones(2, 1), [1, 1], scores, drafted(), nodes=[-1, 0, 1]
    )
    assert torch.equal(found, expected) and sorted_rows == [2]
