"""Text: many tokens at a time become what plain decoding makes of one after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from assisted.core.text import Text

PAD, EOS = 0, 1
LETTERS = "abc"  # tokens 2, 3, 4
VOCABULARY = 2 + len(LETTERS)
PROMPT = [[PAD, 3, 4], [4, 2, 2], [PAD, PAD, 3]]


def _tokenizer():
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {letter: 2 + i for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


LENGTH = MaxLengthCriteria(9)
END = EosTokenCriteria(EOS)
STOP = StopStringCriteria(_tokenizer(), ["ab", "caa"])


class Recorded(StoppingCriteria):
    """A criterion the library has never met: it writes down what it is shown, and stops whole batches on a token."""

    def __init__(self, stops_on=None):
        self.stops_on = stops_on
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids.tolist(), None if scores is None else [step.tolist() for step in scores]))
        return torch.full((len(input_ids),), bool((input_ids[:, -1] == self.stops_on).any()))


class Streamer:
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += [value.tolist()]


def text(prompt, *criteria, pad=PAD, **kwargs):
    return Text(torch.tensor(prompt), StoppingCriteriaList(criteria), pad, kwargs.pop("streamer", None), **kwargs)


def plainly(prompt, tokens, *criteria):
    """Plain decoding where row b wants tokens[b][i] as its i-th: the loop of `generate`, one step for all rows."""
    ids, tokens = torch.tensor(prompt), torch.tensor(tokens)
    unfinished = torch.ones(len(ids), dtype=torch.bool)
    steps = 0
    while unfinished.any():
        new = tokens[:, steps]
        if any(hasattr(c, "eos_token_id") for c in criteria):
            new = new.where(unfinished, PAD)
        ids = torch.cat([ids, new[:, None]], 1)
        unfinished &= ~StoppingCriteriaList(criteria)(ids, None)
        steps += 1
    return ids


def wanted(rows=3, steps=8):
    """What every row would say, pads and ends among it."""
    return st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=steps, max_size=steps), min_size=rows, max_size=rows
    )


def batched(tokens, starts, sizes):
    """The next `sizes[b]` tokens of each row from `starts[b]` on."""
    return [row[start : start + size] for row, start, size in zip(tokens, starts, sizes, strict=True)]


CRITERIA = {
    "length": (LENGTH,),
    "length and end": (LENGTH, END),
    "several ends": (LENGTH, EosTokenCriteria([EOS, 4])),
    "a stop string and end": (LENGTH, END, STOP),
}


@pytest.mark.parametrize("keep_scores", [False, True])
@pytest.mark.parametrize("criteria", CRITERIA.values(), ids=CRITERIA)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_split_equals_one_by_one(criteria, keep_scores, data):
    tokens = data.draw(wanted())
    ours = text(PROMPT, *criteria, keep_scores=keep_scores)
    assert not ours.in_lockstep
    assert not ours.done
    taken = [0, 0, 0]
    while not ours.done:
        sizes = [data.draw(st.integers(1, 4)) for _ in tokens]
        new = batched(tokens, taken, sizes)
        scores = torch.zeros(len(tokens), max(map(len, new)), VOCABULARY) if keep_scores else None
        before = list(ours.ended)
        kept = ours.extend(new, scores, None)
        for row, count in enumerate(kept):
            assert count <= sizes[row]
            assert (count == 0) == before[row]
            assert count == sizes[row] or ours.ended[row]
        taken = [total + count for total, count in zip(taken, kept, strict=True)]
        assert ours.lengths == [3 + count for count in taken]
        assert ours.row_tokens == taken
        assert ours.unfinished == [row for row in range(3) if not ours.ended[row]]
        if not ours.done:
            assert ours.room == 9 - min(ours.lengths[row] for row in ours.unfinished)
        assert ours.last_tokens().tolist() == [[ours.ids[row, n - 1].item()] for row, n in enumerate(ours.lengths)]
    assert ours.output().tolist() == plainly(PROMPT, tokens, *criteria).tolist()


@pytest.mark.parametrize("criteria", CRITERIA.values(), ids=CRITERIA)
@settings(max_examples=20, deadline=None)
@given(tokens=wanted())
def test_in_step_equals_plain(criteria, tokens):
    ours = text(PROMPT, *criteria)
    none = torch.zeros(3, VOCABULARY)
    for new in torch.tensor(tokens).T:
        if ours.done:
            break
        ours.extend_in_lockstep(new, none, none)
    plain = plainly(PROMPT, tokens, *criteria)
    assert ours.output().tolist() == plain.tolist()
    assert ours.lengths == [plain.shape[1]] * 3
    alone = text(PROMPT, *criteria)
    alone.extend(tokens, None, None)
    assert ours.row_tokens == alone.row_tokens


@settings(max_examples=20, deadline=None)
@given(tokens=wanted())
def test_stop_strings_without_an_end_token_run_in_step(tokens):
    """Rows that have stopped go on with their own tokens until all have: plain decoding pads them only for an end token."""
    ours = text(PROMPT, LENGTH, STOP, pad=None)
    assert ours.in_lockstep
    none = torch.zeros(3, VOCABULARY)
    for new in torch.tensor(tokens).T:
        if ours.done:
            break
        ours.extend_in_lockstep(new, none, none)
    plain = plainly(PROMPT, tokens, LENGTH, STOP)
    assert ours.output().tolist() == plain.tolist()
    assert ours.row_tokens == [plain.shape[1] - 3] * 3


def test_a_stop_string_may_begin_in_the_prompt_and_ends_its_row_alone():
    ours = text([[3, 4, 2], [3, 3, 3]], LENGTH, END, STOP)  # "bca", "bbb"
    assert ours.extend([[2, 4, 4], [2, 4, 4]], None, None) == [1, 3]  # "caa" is complete
    assert ours.ended == [True, False]
    assert ours.output().tolist() == [[3, 4, 2, 2, PAD, PAD], [3, 3, 3, 2, 4, 4]]


@pytest.mark.parametrize("written", [EOS, [EOS], torch.tensor(EOS), torch.tensor([EOS])], ids=repr)
def test_the_token_that_ends_a_row_counts_and_what_follows_does_not(written):
    ours = text([[2]], MaxLengthCriteria(8), EosTokenCriteria(written))
    assert ours.extend([[3, EOS, 4, 4]], None, None) == [2]
    assert ours.done
    assert ours.row_tokens == [2]
    assert ours.output().tolist() == [[2, 3, EOS]]


@pytest.mark.parametrize("criteria", [(), (STOP,)], ids=["fast", "one by one"])
def test_the_last_token_that_fits_ends_a_row(criteria):
    ours = text([[2, 2]], MaxLengthCriteria(5), END, *criteria)
    assert ours.max_length == 5
    assert ours.room == 3 and ours.ids.shape[1] == 5  # no more memory than the longest text takes
    assert ours.extend([[4, 3]], None, None) == [2]
    assert not ours.done
    assert ours.room == 1
    assert ours.last_tokens().tolist() == [[3]]
    assert ours.extend([[4, 4]], None, None) == [1]
    assert ours.done


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_that_the_prompt_has_reached_leaves_one_token(limit):
    ours = text([[2, 2, 2]], MaxLengthCriteria(limit))
    assert ours.extend([[3, 3]], None, None) == [1]
    assert ours.done
    assert ours.output().tolist() == plainly([[2, 2, 2]], [[3, 3]], MaxLengthCriteria(limit)).tolist()


def test_the_smallest_limit_counts():
    assert text([[2]], MaxLengthCriteria(9), MaxLengthCriteria(4), MaxLengthCriteria(7)).max_length == 4


class Mine(EosTokenCriteria):
    """Of somebody else."""


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("criteria", "streams", "in_lockstep"),
    [
        ((LENGTH,), False, False),
        ((LENGTH, END), False, False),
        ((LENGTH, END, STOP), False, False),
        ((LENGTH, STOP), False, True),
        ((LENGTH, END, MaxTimeCriteria(1e9)), False, True),
        ((LENGTH, END, Recorded()), False, True),
        ((LENGTH, Mine(EOS)), False, True),  # a class derived from a known one is not known
        ((LENGTH, END), True, True),
    ],
)
def test_when_rows_must_stay_in_step(rows, criteria, streams, in_lockstep):
    ours = text([[2]] * rows, *criteria, streamer=Streamer() if streams else None)
    assert ours.in_lockstep == (in_lockstep and rows > 1)


def test_one_row_streams_each_token_once_in_order():
    streamer = Streamer()
    ours = text([[2]], LENGTH, END, streamer=streamer)
    ours.extend([[3, 4]], None, None)
    ours.extend([[2, EOS, 3, 3]], None, None)
    assert streamer.tokens == [[3], [4], [2], [EOS]]


def test_a_batch_streams_a_step_at_a_time_with_padding():
    streamer = Streamer()
    ours = text([[2], [2]], LENGTH, END, streamer=streamer)
    for new in ([3, EOS], [4, 4], [EOS, 4]):
        ours.extend_in_lockstep(torch.tensor(new), torch.zeros(2, VOCABULARY), torch.zeros(2, VOCABULARY))
    assert streamer.tokens == [[3, EOS], [4, PAD], [EOS, PAD]]
    assert ours.done
    assert ours.row_tokens == [3, 1]


@pytest.mark.parametrize("keep_scores", [False, True])
def test_criteria_see_every_prefix_of_a_row_once_in_order(keep_scores):
    criterion = Recorded(stops_on=4)
    ours = text([[2]], LENGTH, criterion, keep_scores=keep_scores)
    scores = torch.arange(4.0 * VOCABULARY).view(1, 4, VOCABULARY)
    assert ours.extend([[3]], scores[:, :1], None) == [1]
    assert ours.extend([[2, 4, 3]], scores[:, 1:], None) == [2]
    assert [ids for ids, _ in criterion.shown] == [[[2, 3]], [[2, 3, 2]], [[2, 3, 2, 4]]]
    for step, (_, seen) in enumerate(criterion.shown, start=1):
        assert seen == (scores[0, :step, None].tolist() if keep_scores else None)


def test_criteria_see_the_whole_batch_once_a_step():
    criterion = Recorded(stops_on=4)
    ours = text([[2], [3]], LENGTH, criterion, keep_scores=True)
    scores = torch.arange(2.0 * VOCABULARY).view(2, VOCABULARY)
    for new in ([3, 3], [2, 4]):
        ours.extend_in_lockstep(torch.tensor(new), scores, scores)
    step = scores.tolist()
    assert criterion.shown == [([[2, 3], [3, 3]], [step]), ([[2, 3, 2], [3, 3, 4]], [step, step])]
    assert ours.done


def test_scores_and_logits_are_stacked_by_step():
    ours = text([[2], [2]], LENGTH, END, keep_scores=True, keep_logits=True)
    scores = torch.rand(2, 3, VOCABULARY)
    logits = torch.rand(2, 3, VOCABULARY).bfloat16()
    assert ours.extend([[3], [EOS, 2, 2]], scores[:, :3], logits[:, :3]) == [1, 1]
    assert ours.extend([[4, 3], [2, 2]], scores[:, 1:], logits[:, 1:]) == [2, 0]
    steps = ours.stacked(ours.scores)
    assert [step.shape for step in steps] == [(2, VOCABULARY)] * 3
    for step, found in enumerate(steps):
        assert torch.equal(found[0], scores[0, step])
        assert torch.equal(found[1], scores[1, 0] if step == 0 else torch.zeros(VOCABULARY))
    for step, found in enumerate(ours.stacked(ours.logits)):
        assert found.dtype == torch.float32
        assert torch.equal(found[0], logits[0, step].float())


@pytest.mark.parametrize(("scores", "logits"), [(True, False), (False, True), (False, False)])
def test_only_what_was_asked_for_is_kept(scores, logits):
    ours = text([[2]], LENGTH, END, keep_scores=scores, keep_logits=logits)
    both = torch.rand(1, 2, VOCABULARY)
    ours.extend([[3, 3]], both, both)
    assert [len(ours.scores[0]), len(ours.logits[0])] == [2 * scores, 2 * logits]


def test_the_prompt_is_copied():
    prompt = torch.tensor([[2, 3]])
    ours = Text(prompt, StoppingCriteriaList([LENGTH]), None, None)
    ours.ids[:] = 4
    assert prompt.tolist() == [[2, 3]]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_reader_gets_the_prompt_without_padding_and_then_what_is_new(rows):
    written, new = text(PROMPT[:rows], LENGTH, END), [[2, 3], [4], [3, EOS]][:rows]
    mask = (torch.tensor(PROMPT[:rows]) != PAD).long()
    assert written.prompts(mask) == [[token for token in row if token != PAD] for row in PROMPT[:rows]]
    assert written.prompts(None) == PROMPT[:rows]
    written.extend(new, None, None)
    assert written.since([3] * rows) == new
    assert written.since([4, 3, 5][:rows]) == [new[0][1:], [4], []][:rows]
    assert written.since(written.lengths) == [[]] * rows
    written.extend([[2]] * rows, None, None)  # what was committed before is read from the ids
    assert written.since([4, 4, 5][:rows]) == [[3, 2], [2], []][:rows]
    assert written.since([3] * rows) == [[2, 3, 2], [4, 2], [3, EOS]][:rows]
