"""Drafts with another tokenizer: the target's tokens exactly, its distribution under sampling, and slots that follow
the text."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from covering import in_turns, over
from made_tokenizers import byte_level, characters, pieces
from pairs import BY_NAME, CALL, ENDS, no_fallback, require_plain
from test_sampling import PROMPT, VOCABULARY, require_distribution, tiny
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

from assisted import AssistedModelForCausalLM, DraftModel, decoding, zoo
from assisted.lengths import Fixed
from assisted.methods import ModelDrafter
from assisted.methods.other_tokenizer.draft import TranslatedDrafter, TranslatedDrafting, _Choice

WAYS = [("text",), ("tokens",), ("text", "tokens")]
PAIRS = ("ab", "cd", "!!", "ef", "MN", "XY")
CODE = [
    "def mean(values):\n    return sum(values) /",
    "class Node:\n    def __init__(self, value):\n        self.value",
    "# é 😀\nfor name in names:\n",
    "import",
]


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    """Every read of the draft is compared with a plain forward over what its tokenizer makes of the whole text."""
    monkeypatch.setattr(decoding, "CHECK_INVARIANTS", True)
    read = TranslatedDrafting._read_committed

    def checked(self, runner, text):
        logits = read(self, runner, text)
        for row in text.unfinished[:4]:
            tokens = torch.tensor([self.rows[row].tokens])
            expected = runner.model(tokens).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=2e-3, rtol=1e-3)
            assert self.held[row] == self.rows[row].tokens
        return logits

    monkeypatch.setattr(TranslatedDrafting, "_read_committed", checked)


def made(target, draft, ours, theirs, ways=("text", "tokens"), draft_length=4):
    model = AssistedModelForCausalLM.from_models(
        target, draft=draft, tokenizer=ours, draft_tokenizer=theirs, draft_length=draft_length
    )
    assert isinstance(model.drafter, TranslatedDrafter)
    model.drafter.ways = ways
    return model


SWAPPED = 40


def renamed(model):
    """The same model over `characters(swapped=SWAPPED)`: it says what the model says, under other ids."""
    other = copy.deepcopy(model)
    ids = torch.arange(model.config.vocab_size)
    ids[3 : 3 + 2 * SWAPPED] = ids[3 : 3 + 2 * SWAPPED].view(-1, 2).flip(1).flatten()
    with torch.no_grad():
        for weight in {other.model.embed_tokens.weight, other.lm_head.weight}:
            weight.copy_(weight[ids])
    return other


def padded(ids, pad=0):
    """Rows but the first padded on the left, each more than the one before."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, : 2 * row] = 0
    return ids.where(mask.bool(), pad), mask


# --- token for token


@pytest.fixture(scope="module")
def shipped():
    return AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft-other-tokenizer", draft_length=4)


@pytest.mark.parametrize("ways", WAYS, ids="-".join)
def test_the_shipped_pair_equals_plain(shipped, ways):
    shipped.drafter.ways = ways
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"), padding_side="left")
    shipped.reset_totals()
    for texts in (CODE[:1], CODE):
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        require_plain(shipped, **inputs, max_new_tokens=40, do_sample=False)
    assert shipped.totals.accepted > 0


@over("architecture", ARCHITECTURES)
def test_every_architecture_equals_plain(architecture):
    """The draft says most tokens under their own ids, some pairs of characters in one token and some under other ids."""
    target = build(architecture)
    draft = half_right(target)
    model = made(target, draft, characters(), characters(PAIRS, swapped=3))
    for ids, mask in (padded(random_ids(target, 1, 20, 20)), padded(random_ids(target, 4, 12, 4))):
        call = CALL | {"attention_mask": mask, "use_cache": True, "eos_token_id": ENDS if len(ids) > 1 else None}
        require_plain(model, ids, **call)
    assert model.totals.accepted > 0


KINDS = {
    "bos": lambda: (characters(), characters(PAIRS, bos=True)),
    "pairs": lambda: (characters(PAIRS), characters(swapped=SWAPPED)),
    "smaller": lambda: (characters(PAIRS, bos=True), characters(PAIRS[::-1], entries=80)),
    "bytes-pieces": lambda: (byte_level(), pieces("legacy")),
    "pieces-bytes": lambda: (pieces("first"), byte_level(bos=True)),
    "pieces-pieces": lambda: (pieces("legacy"), pieces("always", 600)),
}


@pytest.mark.parametrize(("kind", "ways"), in_turns(list(KINDS), WAYS))
def test_every_kind_of_tokenizer_equals_plain(kind, ways):
    """Random models write random tokens: bytes that are no characters, special tokens, text cut in no tokenizer's way."""
    ours, theirs = KINDS[kind]()
    target, draft = (build(BY_NAME["llama"], seed, vocab_size=len(t)) for seed, t in enumerate((ours, theirs)))
    model = made(target, draft, ours, theirs, ways)
    for rows in (1, 4):
        ids, mask = padded(random_ids(target, rows, 14, rows))
        require_plain(model, ids, attention_mask=mask, **CALL)
    assert model.totals.drafted > 0


def test_rows_that_stay_in_step_equal_plain():
    """A processor the package has never met is shown committed prefixes only, one after another."""
    target = build(BY_NAME["llama"])
    model = made(target, half_right(target), characters(), characters(PAIRS))

    class Odd(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores * (1.0 + 0.5 * (input_ids.shape[1] % 2))

    ids, mask = padded(random_ids(target, 3, 12, 1))
    call = CALL | {"attention_mask": mask, "logits_processor": LogitsProcessorList([Odd()])}
    require_plain(model, ids, **call)


@pytest.mark.parametrize("policy", ["confidence", "adaptive", Fixed(1)], ids=str)
def test_draft_lengths(shipped, policy):
    inputs = shipped.tokenizer(CODE[0], return_tensors="pt")
    plain = shipped.target.generate(**inputs, max_new_tokens=40, do_sample=False)
    with no_fallback():
        assert shipped.generate(**inputs, max_new_tokens=40, do_sample=False, draft_length=policy).equal(plain)
    assert shipped.report.drafted > 0


@pytest.mark.parametrize(("name", "context"), in_turns(["gpt2", "bloom", "llama"], [24, 8]))
def test_the_context_of_the_draft_ends(name, context):
    target = build(BY_NAME[name])
    model = made(target, build(BY_NAME[name], max_position_embeddings=context), characters(), characters(PAIRS))
    ids, mask = padded(random_ids(target, 2, 12, 3))
    call = CALL | {"max_new_tokens": 40, "attention_mask": mask}
    require_plain(model, ids, **call)


# --- the same model under other ids


@pytest.mark.parametrize("ways", WAYS, ids="-".join)
def test_greedy_accepts_all_of_a_model_that_is_the_target(ways):
    target = build(BY_NAME["llama"])
    model = made(target, renamed(target), characters(), characters(swapped=SWAPPED), ways)
    ids, mask = padded(random_ids(target, 3, 12, 5))
    greedy = CALL | {"attention_mask": mask, "max_new_tokens": 16}
    plain = target.generate(ids, **greedy)
    assert model.generate(ids, **greedy).tolist() == plain.tolist()
    special = sum((plain[:, 12:] < 3).any(1).tolist())  # what it says behind one is another text
    if not special:
        assert model.report.acceptance_rate == 1


def test_sampling_accepts_all_of_a_model_that_is_the_target():
    """q is p, up to what the draft can't say: here nothing."""
    target = build(BY_NAME["llama"])
    model = made(target, renamed(target), characters(), characters(swapped=SWAPPED), ("tokens",))
    torch.manual_seed(1)
    model.generate(
        random_ids(target, 1, 12, 5), **CALL | {"do_sample": True, "temperature": 0.7, "bad_words_ids": [[0], [1], [2]]}
    )
    assert model.report.acceptance_rate > 0.99


# --- sampling

FIVE = characters(special=("<pad>",), entries=VOCABULARY, first="a")  # <pad> a b c d
OTHERS = {
    "no shared c": characters(special=("<pad>",), entries=VOCABULARY, first="b"),  # <pad> b c d e
    "pairs": characters(("ab", "ba"), special=("<pad>",), entries=VOCABULARY, first="a"),  # <pad> a b ab ba
}


def sampler(theirs, ways):
    target, draft = tiny(0), tiny(1)
    with torch.no_grad():
        for weight, aim in zip(draft.parameters(), target.parameters(), strict=True):
            weight.lerp_(aim, 0.6)
    return made(target, draft, FIVE, theirs, ways, draft_length=2)


SETTINGS = [{}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.8, "repetition_penalty": 1.5}]


WAYS_AND_SETTINGS = [(("tokens",), 2), (("tokens", "text"), 1), (("tokens",), 0), (("tokens",), 1), (("text",), 0)]
IN_DEFAULT = [("pairs", (("tokens", "text"), 1)), ("no shared c", (("tokens",), 2))]


@pytest.mark.parametrize(
    ("theirs", "ways", "setting"),
    [
        pytest.param(theirs, ways, SETTINGS[at], marks=() if (theirs, (ways, at)) in IN_DEFAULT else pytest.mark.slow)
        for theirs in OTHERS
        for ways, at in WAYS_AND_SETTINGS
    ],
    ids=str,
)
def test_sampling_follows_the_targets_distribution(ways, theirs, setting, monkeypatch):
    monkeypatch.setattr(_Choice, "trials", 1)  # rounds take turns
    model = sampler(OTHERS[theirs], ways)
    require_distribution(model, seed=3, **setting)


def test_q_is_the_distribution_of_the_draft_on_what_both_can_say(monkeypatch):
    model = sampler(OTHERS["no shared c"], ("tokens",))
    drafts = []
    propose = TranslatedDrafting.propose

    def kept(self, text, budget):
        grown = text.unfinished  # of rows that have ended nobody asks
        draft = propose(self, text, budget)
        drafts.append((draft, {row: self.rows[row].tokens[:] for row in grown}))
        return draft

    monkeypatch.setattr(TranslatedDrafting, "propose", kept)
    model.generate(PROMPT, max_new_tokens=8, do_sample=True, top_k=0, temperature=0.5, num_return_sequences=3)
    for draft, texts in drafts:
        assert draft.q.sum(-1).allclose(torch.ones(()))
        assert draft.q[..., 1].eq(0).all()  # "a", which the draft has no token for
        for row, tokens in texts.items():
            logits = model.drafter.model(torch.tensor([tokens])).logits[0, -1] / 0.5
            both = torch.softmax(logits[[0, 1, 2, 3]], -1)  # <pad> b c d in its own ids
            torch.testing.assert_close(draft.q[row, 0, [0, 2, 3, 4]], both, atol=1e-4, rtol=1e-4)
            assert draft.q[row, range(draft.lengths[row]), draft.tokens[row, : draft.lengths[row]]].gt(0).all()


def test_text_is_drafted_without_a_distribution(shipped):
    shipped.drafter.ways = ("text",)
    distributions = []
    judge = decoding.judge
    try:
        decoding.judge = lambda draft, *rest: distributions.append(draft.q) or judge(draft, *rest)
        shipped.generate(**shipped.tokenizer(CODE[0], return_tensors="pt"), max_new_tokens=8, do_sample=True)
    finally:
        decoding.judge = judge
    assert distributions
    assert all(distribution is None for distribution in distributions)


# --- which way


def test_the_way_that_is_accepted_more_is_taken():
    choice = _Choice(("text", "tokens"))
    for _ in range(200):
        way = choice.pick()
        choice.observe(way, {"text": 1.0, "tokens": 2.0}[way])
    assert choice.seen["text"] < 20
    for _ in range(200):  # the text changes
        way = choice.pick()
        choice.observe(way, {"text": 3.0, "tokens": 2.0}[way])
    assert choice.seen["text"] > 150


# --- loading and saving


def test_the_same_tokenizer_takes_the_ordinary_path():
    target = build(BY_NAME["llama"])
    for theirs in (characters(), None):
        model = AssistedModelForCausalLM.from_models(
            target, draft=half_right(target), tokenizer=characters(), draft_tokenizer=theirs
        )
        assert type(model.drafter) is ModelDrafter


@pytest.mark.parametrize("from_folder", [True, False], ids=["from a folder", "from memory"])
def test_a_pair_is_saved_with_both_tokenizers(tmp_path, from_folder):
    target, theirs = build(BY_NAME["llama"]), characters(PAIRS)
    draft = half_right(target)
    if from_folder:  # the tokenizer of a model in memory is found where the model came from
        draft.save_pretrained(tmp_path / "own")
        theirs.save_pretrained(tmp_path / "own")
        draft = type(draft).from_pretrained(tmp_path / "own")
        model = made(target, draft, characters(), None)
    else:
        model = made(target, DraftModel(draft, tokenizer=theirs), characters(), None)
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    assert isinstance(again.drafter, TranslatedDrafter)
    assert AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft").get_vocab() == theirs.get_vocab()
    assert AutoTokenizer.from_pretrained(tmp_path / "pair").get_vocab() == characters().get_vocab()
    ids = random_ids(target, 1, 12, 1)
    require_plain(again, ids, **CALL)
    assert again.report.accepted > 0


def test_a_draft_that_fails_costs_speed_only(shipped, monkeypatch):
    inputs = shipped.tokenizer(CODE[0], return_tensors="pt")
    plain = shipped.target.generate(**inputs, max_new_tokens=20, do_sample=False)

    def broken(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TranslatedDrafting, "_as_text", broken)
    with pytest.warns(UserWarning, match="Drafting failed"):
        assert shipped.generate(**inputs, max_new_tokens=20, do_sample=False).equal(plain)
