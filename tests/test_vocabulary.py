"""What tokens stand for: the same bytes in every notation, told apart from the same names or the same ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import byte_level, characters, pieces
from pairs import pair
from test_robustness import resized

from assisted.loading.vocabulary import Vocabulary, same_tokens, shared_tokens

TOKENIZERS = {
    "bytes": byte_level(),
    "bytes with bos": byte_level(bos=True),
    "legacy": pieces("legacy"),
    "first": pieces("first"),
    "always": pieces("always"),
}
VOCABULARIES = {name: Vocabulary(tokenizer, len(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
WORDS = st.text(alphabet="abc éß漢😀.()\n", max_size=40).map(lambda text: "a" + text)


def said(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.pieces[token] or b"" for token in ids)


@pytest.mark.parametrize("name", VOCABULARIES)
@given(text=WORDS)
def test_pieces_are_the_bytes_of_the_text(name, text):
    vocabulary = VOCABULARIES[name]
    before = b" " if vocabulary.prepends else b""
    assert said(vocabulary, vocabulary.tokens(text)) == before + text.encode()
    assert vocabulary.prefix + vocabulary.tokens(text) == TOKENIZERS[name](text).input_ids


@pytest.mark.parametrize("name", VOCABULARIES)
@given(text=WORDS)
def test_text_behind_other_tokens_gets_no_space(name, text):
    vocabulary = VOCABULARIES[name]
    for behind in (text, " " + text):
        assert said(vocabulary, vocabulary.continuation_tokens(behind)) == behind.encode()
    assert vocabulary.tokens("a") + vocabulary.continuation_tokens(" " + text) == vocabulary.tokens("a " + text)


def test_what_prompts_begin_with():
    found = {name: (vocabulary.prefix, vocabulary.prepends) for name, vocabulary in VOCABULARIES.items()}
    assert found == {
        "bytes": ([], False),
        "bytes with bos": ([0], False),
        "legacy": ([1], True),
        "first": ([1], True),
        "always": ([1], True),
    }
    assert Vocabulary(characters(bos=True), 96).prefix == [1]
    assert Vocabulary(characters(first="À", bos=True), 96).prefix == [1]  # the probed text has no tokens there


def test_bytes_that_are_no_character():
    half = "😀".encode()[:2]
    assert said(VOCABULARIES["bytes"], VOCABULARIES["bytes"].byte_tokens(half)) == half
    assert said(VOCABULARIES["legacy"], VOCABULARIES["legacy"].byte_tokens(half)) == half
    assert Vocabulary(characters(), 96).byte_tokens(half) == []


def test_plain_tokens_go_before_escaped_bytes():
    vocabulary = VOCABULARIES["legacy"]
    assert vocabulary.by_bytes[b"a"] == vocabulary.continuation_tokens("a")[0]
    assert vocabulary.pieces.count(b"a") == 2


def test_spaces_are_the_same_in_every_notation():
    ours, theirs = VOCABULARIES["bytes"], VOCABULARIES["legacy"]
    shared = shared_tokens(ours, theirs)
    assert shared[ours.by_bytes[b" return"]] == theirs.by_bytes[b" return"]
    assert all(ours.pieces[a] == theirs.pieces[b] for a, b in shared.items() if a != ours.end)
    assert shared[ours.end] == theirs.end  # the text ends in both, by whatever name


def test_special_tokens_are_shared_by_name():
    ours, theirs = Vocabulary(characters(), 96), Vocabulary(characters(special=("<s>", "<pad>", "</s>")), 96)
    shared = shared_tokens(ours, theirs)
    assert (shared[0], shared[1], shared[2]) == (1, 0, 2)


def test_nothing_shared_is_refused():
    names = ("[PAD]", "[BOS]", "[EOS]")
    with pytest.raises(ValueError, match=r"draft: .*shares no token"):
        shared_tokens(Vocabulary(characters(), 96), Vocabulary(characters(first="À", special=names), 96))


def test_tokens_that_the_model_lacks_are_left_out():
    vocabulary = Vocabulary(characters(), 50)
    assert len(vocabulary.pieces) == 50
    assert max(vocabulary.by_bytes.values()) == 49
    assert vocabulary.tokens("!" + chr(ord("!") + 46) + chr(ord("!") + 47)) == [3, 49]
    assert Vocabulary(characters(special=("<pad>", "<s>")), 96).end is None


def test_the_callers_tokenizer_can_do_as_it_likes():
    tokenizer = characters()
    vocabulary = Vocabulary(tokenizer, 96)
    tokenizer(["abc", "a"], padding="max_length", max_length=2, truncation=True)
    assert vocabulary.tokens("abcd") == characters()("abcd").input_ids


def test_the_same_tokens_or_others():
    target, model = pair()
    larger = resized(104)
    assert same_tokens(target, model.drafter.model, None, None)
    assert same_tokens(target, larger, characters(), characters())
    assert not same_tokens(target, target, characters(), characters(swapped=1))
    assert not same_tokens(target, target, characters(), characters(merges=("ab",)))
    for tokenizers, missing in (((None, characters()), "tokenizer"), ((characters(), None), "draft_tokenizer")):
        with pytest.raises(ValueError, match=f"Pass {missing}="):
            same_tokens(target, larger, *tokenizers)
