"""Text between two tokenizers: however the committed tokens come in, they are what the draft's tokenizer makes of the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_level, characters, pieces
from transformers import AutoTokenizer

from assisted import zoo
from assisted.loading.vocabulary import Vocabulary
from assisted.methods.other_tokenizer.translation import TranslatedText, Translation

TOKENIZERS = {
    "target": AutoTokenizer.from_pretrained(zoo.folder("target")),
    "draft": AutoTokenizer.from_pretrained(zoo.folder("draft-other-tokenizer")),
    "bytes": byte_level(bos=True),
    "legacy": pieces("legacy"),
    "first": pieces("first"),
}
VOCABULARIES = {name: Vocabulary(tokenizer, len(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
PAIRS = [("target", "draft"), ("draft", "target"), ("target", "bytes"), ("target", "legacy"), ("legacy", "target")]
PAIRS += [("first", "legacy"), ("bytes", "first")]
WORDS = st.sampled_from(
    ["self", "return", " ", "  ", "\n    ", "é", "漢字", "😀", "👩‍👩‍👧", "123", "(x):", "'s", ".", "\t", "ab"]
)
TEXTS = st.lists(WORDS, max_size=60).map(lambda words: "a" + "".join(words))


def translation(ours: str, theirs: str) -> Translation:
    return Translation(VOCABULARIES[ours], VOCABULARIES[theirs])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids="-".join)
@settings(max_examples=40)
@given(text=TEXTS, steps=st.lists(st.integers(1, 7), min_size=1, max_size=20))
def test_in_steps_or_at_once(ours, theirs, text, steps):
    ids = TOKENIZERS[ours](text).input_ids
    row, place, number = TranslatedText(translation(ours, theirs)), 0, 0
    while place < len(ids):
        settled = row.tokens[: row.settled]
        row.extend(ids[place : place + steps[number % len(steps)]])
        assert row.tokens[: len(settled)] == settled
        place += steps[number % len(steps)]
        number += 1
    assert row.tokens == TOKENIZERS[theirs](text).input_ids
    assert row.read == len(ids)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids="-".join)
def test_the_cost_of_a_step_does_not_grow(ours, theirs, monkeypatch):
    cut = []
    encode = Vocabulary.tokens
    monkeypatch.setattr(Vocabulary, "tokens", lambda self, text: cut.append(len(text)) or encode(self, text))
    text = "def mean(values):\n    return sum(values) / len(values)  # the mean\n\n\n" * 60
    ids = TOKENIZERS[ours](text).input_ids
    row = TranslatedText(translation(ours, theirs))
    for place in range(0, len(ids), 4):
        row.extend(ids[place : place + 4])
    assert row.tokens == TOKENIZERS[theirs](text).input_ids
    assert max(cut) < 150


@pytest.mark.parametrize(
    "text", ["漢字" * 300, "a" * 600, "0123456789" * 60, "https://a.b/c?d=" * 40], ids=lambda t: t[:4]
)
def test_text_without_spaces_is_settled_too(text):
    ids = TOKENIZERS["target"](text).input_ids
    row = TranslatedText(translation("target", "draft"))
    for place in range(0, len(ids), 3):
        row.extend(ids[place : place + 3])
    assert row.tokens == TOKENIZERS["draft"](text).input_ids
    assert len(row.tokens) - row.settled < 140


def test_a_character_that_has_only_begun():
    ids = TOKENIZERS["target"]("a😀b").input_ids
    row = TranslatedText(translation("target", "draft"))
    row.extend(ids[:3])  # a and two of four bytes
    draft = VOCABULARIES["draft"]
    assert b"".join(draft.pieces[token] for token in row.tokens) == "a😀".encode()[:3]
    rest = draft.byte_tokens("😀".encode()[2:]) + draft.tokens("b")
    assert row.to_target(rest) == ids[3:]
    row.extend(ids[3:])
    assert row.tokens == TOKENIZERS["draft"]("a😀b").input_ids


def test_bytes_that_never_become_a_character():
    ids = TOKENIZERS["target"]("a😀b").input_ids
    row = TranslatedText(translation("target", "draft"))
    row.extend([*ids[:3], ids[5], ids[0]])
    assert row.tokens == TOKENIZERS["draft"]("a�ba").input_ids


def test_what_is_said_is_cut_by_the_target():
    row = TranslatedText(translation("target", "draft"))
    row.extend(TOKENIZERS["target"]("def f(x):\n    return").input_ids)
    drafted = TOKENIZERS["draft"](" values / len(values)").input_ids
    assert row.to_target(drafted) == TOKENIZERS["target"](" values / len(values)").input_ids
    assert row.to_target(drafted) != drafted
    end = VOCABULARIES["draft"].end
    assert row.to_target([*drafted, end, *drafted])[-1] == VOCABULARIES["target"].end
    assert row.to_target([end]) == [VOCABULARIES["target"].end]
    assert row.to_target([]) == []


def test_what_is_said_stands_behind_the_text():
    """A draft with "▁" continues a word or begins one; neither gets a space that was not drafted."""
    row = TranslatedText(translation("first", "legacy"))
    row.extend(TOKENIZERS["first"]("def f(x):\n    re").input_ids)
    for text in ("turn x", " x", "\n"):
        said = row.to_target(VOCABULARIES["legacy"].continuation_tokens(text))
        assert b"".join(VOCABULARIES["first"].pieces[token] for token in said) == text.encode()


def test_special_tokens_go_over_by_name():
    ours = characters(special=("<pad>", "<s>", "</s>", "<user>", "<tool>"))
    theirs = characters(special=("</s>", "<s>", "<pad>", "<user>"), bos=True)
    row = TranslatedText(Translation(Vocabulary(ours, 96), Vocabulary(theirs, 96)))
    name = ours.convert_tokens_to_ids
    row.extend([name("<s>"), *ours("ab").input_ids, name("<tool>"), name("<user>"), *ours("c").input_ids, name("</s>")])
    names = theirs.convert_ids_to_tokens(row.tokens)
    assert names == [
        "<s>",
        "a",
        "b",
        "<user>",
        "c",
        "</s>",
    ]  # one beginning, nothing for what the draft has no word for
    assert row.settled == len(names)


def test_a_text_of_nothing_has_a_token():
    row = TranslatedText(Translation(Vocabulary(characters(), 96), Vocabulary(characters(swapped=1), 96)))
    assert row.tokens == [2]
    row.extend(characters()("a").input_ids)
    assert row.tokens == characters(swapped=1)("a").input_ids
    row.extend([2])
    assert row.tokens == [*characters(swapped=1)("a").input_ids, 2]
    row.extend([10**6])  # an id behind the vocabulary says nothing
    assert len(row.tokens) == 2
    row = TranslatedText(Translation(Vocabulary(characters(), 96), Vocabulary(characters(swapped=1), 96)))
    row.extend([0, *characters()("a").input_ids])
    assert row.tokens == [0, *characters(swapped=1)("a").input_ids]
