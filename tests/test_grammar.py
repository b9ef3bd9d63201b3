"""Grammars: the text, its distribution and the matchers are those of plain `generate`, without lockstep."""

import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from architectures import VOCABULARY
from automata import END, Automaton, Brackets, Fragile, brackets
from covering import in_turns
from hypothesis import given
from hypothesis import strategies as st
from pairs import CALL, ENDS, Listener, no_fallback, pair, prompt
from test_sampling import ALPHA, p_value, towards
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

from assisted import AssistedModelForCausalLM, Combined, DraftTree, SessionPool, Suffix
from assisted.distribution import Distribution
from assisted.grammars import GrammarProcessor, PrefixProcessor, check_schema
from assisted.grammars.matcher import LLGuidance
from assisted.grammars.processor import Grammar, grammar_of
from assisted.lengths.policies import Never
from assisted.methods.grammar import FEW, Guesses

pytestmark = pytest.mark.usefixtures("invariants")


def generate(model, **kwargs):
    start = prompt(kwargs.pop("rows", 1))
    return model.generate(start["ids"], attention_mask=start["attention_mask"], **(CALL | kwargs))


# --- masks


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12), st.booleans())
def test_masks_after_rollback_are_those_of_a_fresh_matcher(paths, packed):
    edges = {0: {0: 1, 1: 0}, 1: {2: 0, 0: 2}, 2: {3: None, 1: 1}}
    make = lambda: Automaton(edges, packed=packed, size=4)  # noqa: E731
    grammar = grammar_of(GrammarProcessor(make))
    grammar.begin(torch.zeros(1, 3, dtype=torch.int64), 4)
    committed: list[int] = []
    for number, path in enumerate(paths):
        fresh = make()
        inside = all(not fresh.ended and fresh.advance(token) for token in [*committed, *path])
        if inside and fresh.ended:
            continue
        found = grammar.mask(0, tuple(path))
        assert (found is not None) == inside
        if inside:
            expected = [token in edges[fresh.states[-1]] for token in range(4)]
            assert found.tolist() == expected
            if number % 3 == 0:
                committed += path
                grammar.read(0, torch.tensor([0, 0, 0, *committed]), 3 + len(committed))


def test_tokens_after_the_mask_are_forbidden():
    processor = GrammarProcessor(lambda: Automaton({0: {1: 0}}, size=4))
    assert processor(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 6))[0].isfinite().tolist() == [
        0,
        1,
        0,
        0,
        0,
        0,
    ]


def test_a_processor_in_use_or_of_another_class_is_not_recognised():
    class Derived(GrammarProcessor):
        pass

    used = brackets()
    used(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, VOCABULARY))
    assert grammar_of(brackets()) is not None
    for other in (used, Derived(Brackets), TemperatureLogitsWarper(0.5), object()):
        assert grammar_of(other) is None
    used.reset()
    assert isinstance(grammar_of(used), Grammar)


def test_what_make_returns_must_be_a_matcher():
    with pytest.raises(ValueError, match=r"make: object is not a matcher.*llguidance"):
        GrammarProcessor(object)(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 4))


def test_rows_do_not_share_a_matcher():
    matcher = Brackets()
    with pytest.raises(ValueError, match="make: two rows of the batch got the same matcher"):
        generate(pair()[1], rows=2, logits_processor=[GrammarProcessor(lambda: matcher)])


# --- greedy text


NAMES = ["llama", "gpt2", "gemma3", "qwen3", "bloom"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_plain_generate(name, rows):
    target, model = pair(name)
    for ends in (None, ENDS):
        plain = generate(target, rows=rows, eos_token_id=ends, logits_processor=[brackets()])
        with no_fallback():
            ours = generate(model, rows=rows, eos_token_id=ends, logits_processor=[brackets(packed=True)])
        assert ours.tolist() == plain.tolist()
        assert model.report.accepted > 0


def test_rows_advance_on_their_own():
    """Forward passes of a batch: as many as its slowest row needs alone, where lockstep takes the slowest of each round."""

    class Unknown(LogitsProcessor):
        def __init__(self):
            self.processor = brackets()

        def __call__(self, input_ids, scores):
            return self.processor(input_ids, scores)

    model = pair()[1]
    passes = []
    for processor in (brackets(), Unknown()):
        generate(model, rows=3, max_new_tokens=48, logits_processor=[processor])
        passes.append(model.report.target_passes)
    assert passes[0] < passes[1]


@pytest.mark.filterwarnings("ignore::assisted.core.drafts.DraftingStopped")
def test_a_row_whose_matcher_fails_at_a_draft_goes_on_without():
    target, model = pair()
    kinds = iter([Fragile, Brackets, Brackets])
    plain = generate(target, rows=3, logits_processor=[brackets()])
    found = generate(model, rows=3, logits_processor=[GrammarProcessor(lambda: next(kinds)())])
    assert found.tolist() == plain.tolist()
    assert model.report.accepted > 0 and "no such state" in model.report.warnings[0]


def test_several_sequences_and_other_processors():
    target, model = pair()
    kwargs = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "eos_token_id": ENDS,
        "rows": 2,
    }
    for more in ({}, {"suppress_tokens": [20, 30, 40]}):
        plain = generate(target, **kwargs, **more, logits_processor=[brackets()])
        assert generate(model, **kwargs, **more, logits_processor=[brackets()]).tolist() == plain.tolist()
    model.generate(
        prompt(2)["ids"], **(CALL | {"do_sample": True}), num_return_sequences=3, logits_processor=[brackets()]
    )
    assert model.report.accepted > 0


class Counts(LogitsProcessor):
    """Depends on its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.linspace(0, self.calls % 3, scores.shape[-1])


@pytest.mark.parametrize("rows", [1, 3])
def test_in_lockstep_with_a_streamer_or_an_unknown_processor(rows):
    target, model = pair()
    for draft_length in (4, None):
        for more in ([], [Counts]):
            outputs = []
            for one in (target, model):
                streamer = Listener()
                kwargs = {} if one is target else {"draft_length": draft_length}
                made = [*(kind() for kind in more), brackets()]
                kwargs |= {} if rows > 1 and one is target else {"streamer": streamer}
                text = generate(one, rows=rows, eos_token_id=ENDS, logits_processor=made, **kwargs)
                outputs.append((text.tolist(), len(streamer.heard) if rows == 1 else 0))
            assert outputs[0] == outputs[1]


def test_scores_of_every_step_are_those_of_plain_generate():
    target, model = pair()
    details = {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = (generate(one, logits_processor=[brackets()], **details) for one in (target, model))
    assert torch.allclose(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ends", [None, ENDS])
def test_the_matchers_end_where_plain_generate_leaves_them(rows, ends):
    target, model = pair()
    ours, theirs = brackets(), brackets()
    generate(target, rows=rows, eos_token_id=ends, logits_processor=[theirs])
    generate(model, rows=rows, eos_token_id=ends, logits_processor=[ours])
    assert [one.states for one in ours.matchers] == [one.states for one in theirs.matchers]
    assert ours.length == theirs.length


def test_a_second_call_needs_a_reset():
    target, model = pair()
    for one in (target, model):
        processor = brackets()
        first = generate(one, logits_processor=[processor])
        with pytest.raises(ValueError, match="make one for every call of generate, or call reset"):
            generate(one, logits_processor=[processor])
        processor.reset()
        assert generate(one, logits_processor=[processor]).tolist() == first.tolist()


def test_continued_turns():
    target, model = pair()
    texts = []
    for one in (target, model):
        start = prompt()["ids"]
        for _ in range(2):
            output = one.generate(
                start,
                **CALL,
                logits_processor=[brackets()],
                return_dict_in_generate=True,
                attention_mask=torch.ones_like(start),
            )
            start = torch.cat([output.sequences, prompt(seed=4)["ids"]], 1)
        texts.append(start.tolist())
    assert texts[0] == texts[1]


# --- what only depends on the prefix


class Doubled(PrefixProcessor):
    """Scores that depend on the last token of each row."""

    def __call__(self, input_ids, scores):
        return scores * (1 + (input_ids[:, -1:] % 3))


def test_a_processor_that_says_so_needs_no_lockstep():
    target, model = pair()
    assert not Distribution(LogitsProcessorList([Doubled(), brackets()]), True).in_order
    plain = generate(target, rows=3, eos_token_id=ENDS, logits_processor=[Doubled(), brackets()])
    assert (
        generate(model, rows=3, eos_token_id=ENDS, logits_processor=[Doubled(), brackets()]).tolist() == plain.tolist()
    )


# --- guesses


def chain_of(tokens, end=END):
    """A grammar with one text."""
    edges = {number: {token: number + 1} for number, token in enumerate(tokens)}
    return {**edges, len(tokens): {end: None}}


def test_forced_tokens_are_drafted_also_where_the_drafter_finds_nothing():
    target, tokens = pair()[0], [7, 30, 31, 50, 9, 44, 12, 13, 14, 15]
    model = AssistedModelForCausalLM.from_models(target, draft="ngram")
    output = generate(
        model,
        eos_token_id=END,
        logits_processor=[GrammarProcessor(lambda: Automaton(chain_of(tokens)))],
        max_new_tokens=30,
    )
    assert output[0, -11:].tolist() == [*tokens, END]
    assert model.report.target_passes == 1  # besides the prompt's
    assert model.report.accepted == model.report.drafted == 10


def test_a_fixed_draft_length_limits_guesses():
    target, tokens = pair()[0], list(range(30, 50))
    make = lambda: GrammarProcessor(lambda: Automaton(chain_of(tokens)))  # noqa: E731
    model = AssistedModelForCausalLM.from_models(target, draft="ngram")
    generate(model, eos_token_id=END, logits_processor=[make()], max_new_tokens=30, draft_length=4)
    assert model.report.target_passes == 20 / 5
    generate(model, eos_token_id=END, logits_processor=[make()], max_new_tokens=30, draft_length=Never())
    assert model.report.drafted == 0


def test_chains_are_cut_where_they_leave_the_grammar():
    start = prompt()["ids"][0].tolist()
    model = AssistedModelForCausalLM.from_models(pair()[0], draft=Suffix(corpus=[[*start, 30, 31, 40, 50, 60]]))
    edges = {0: {30: 1, 70: 1, 71: 1}, 1: {31: 2, 72: 2}, 2: {73: 3, 74: 3, 75: 3}, 3: {76: 3, 77: 3}}
    generate(model, logits_processor=[GrammarProcessor(lambda: Automaton(edges))], max_new_tokens=3, draft_length=5)
    assert model.report.drafted <= 2  # 40 is never drafted


class Pieces:
    """A tokenizer of these tokens."""

    def __init__(self, *texts):
        self.texts = texts

    def convert_ids_to_tokens(self, token):
        return self.texts[token]


@pytest.mark.parametrize(
    ("texts", "last", "expected"),
    [
        (("{", '{"', '{"name', "x"), 3, 2),  # the longest of one text
        (("{", "[", "{[", "x"), 3, None),  # two texts
        ((":", ":Ġ", ':Ġ"', ':"', "ĊĠ:", "x"), 5, 2),  # with the usual space
        (('"', 'Ġ"', "Ċ", ","), 3, 1),  # after a comma
        (('"', 'Ġ"', "Ċ", "{"), 3, 0),
        (("Ġ", "Ċ", "x"), 2, None),
    ],
)
def test_what_every_continuation_begins_with(texts, last, expected):
    mask = torch.tensor([number != last for number in range(len(texts))])
    assert guess(Guesses(Pieces(*texts)), mask, last) == expected


def guess(guesses, mask, last):
    found = guesses.after(mask, last)
    return found and found[0]


def test_without_a_tokenizer_single_tokens_are_forced():
    assert Guesses(None).after(torch.tensor([False, True, False]), 0) == (1, 1.0)
    for mask in ([False, True, True], [False] * 3):
        assert Guesses(None).after(torch.tensor(mask), 0) is None


def test_what_came_is_remembered_until_it_is_wrong():
    guesses, few, many = Guesses(None), torch.tensor([True] * 3), torch.ones(FEW + 1, dtype=torch.bool)
    guesses.learn(few, 0, 2)
    assert guess(guesses, few, 0) == guess(guesses, few, 1) == 2
    guesses.learn(few, 0, 1)
    assert guess(guesses, few, 0) == 1
    guesses.learn(many, 0, 5)
    assert guess(guesses, many, 0) == 5 and guess(guesses, many, 1) is None
    for _ in range(3):
        guesses.learn(few, 0, 1)
    guesses.learn(few, 0, 2)  # one miss after several hits
    assert guess(guesses, few, 0) == guess(guesses, few, 1) == 1


def test_space_is_as_it_was_after_the_same_character():
    pieces = Pieces("{", '"', "Ċ", 'Ġ"', "x")
    guesses, mask = Guesses(pieces), torch.tensor([False, True, True, True, False])
    assert guess(guesses, mask, 0) == 1
    guesses.learn(mask, 0, 2)
    other = torch.tensor([False, True, True, True, False, False])  # another state of the grammar
    assert guess(guesses, other, 0) == 2


# --- no text satisfies it


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("tokens", [[], [30], [30, 31, 32], list(range(30, 49))])
def test_a_grammar_that_cannot_be_satisfied_is_an_error(tokens, do_sample):
    edges = {**chain_of(tokens), len(tokens): {}}
    for name in ("llama", "bloom"):
        with pytest.raises(ValueError, match=f"allows no token of this vocabulary after {len(tokens)} new tokens"):
            generate(
                pair(name)[1],
                logits_processor=[GrammarProcessor(lambda: Automaton(edges))],
                do_sample=do_sample,
                rows=2,
                max_new_tokens=20,
            )


def test_a_token_that_another_processor_forces_is_an_error():
    class Forces(PrefixProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([5]), 0.0)

    edges = {0: {30: 0, 31: 0}}
    with pytest.raises(ValueError, match="does not allow token 5"):
        generate(pair()[1], logits_processor=[GrammarProcessor(lambda: Automaton(edges)), Forces()])


# --- distribution: texts of 6 tokens that end inside drafts

SIZE, STOP, NEW, SEQUENCES = 6, 5, 4, 4_000
PROMPT = torch.tensor([[1, 3, 2, 4]])
EDGES = {
    0: {0: 0, 1: 1, 2: 2},
    1: {3: 0, 4: 1, STOP: None},
    2: {0: 1, STOP: None, 1: 3},
    3: {2: 1},
}


def small(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=STOP, bos_token_id=None, pad_token_id=0)).eval()


@pytest.fixture(scope="module")
def target():
    return small(0)


def half_target(target):
    return towards(target, small(1))


def enumerated(target):
    """Texts after the prompt, padded with 0, and their probabilities."""
    found, open_ones = {}, {(): (0, 1.0)}
    for _ in range(NEW):
        following = {}
        for text, (state, probability) in open_ones.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.int64)], 1)
            with torch.no_grad():
                logits = target(ids).logits[0, -1].double()
            allowed = list(EDGES[state])
            for token, share in zip(allowed, torch.softmax(logits[allowed], 0).tolist(), strict=True):
                place = found if token == STOP or len(text) == NEW - 1 else following
                place[(*text, token)] = (EDGES[state][token], probability * share)
        open_ones = following
    return {text: probability for text, (_, probability) in found.items()}


CORPUS = [list(text) for text in itertools.islice(itertools.product((0, 1, 3, 2, 4, STOP), repeat=4), 0, 1296, 7)]
DRAFTS = {
    "draft model": half_target,
    "suffix": lambda target: Suffix(corpus=CORPUS),
    "suffix tree": lambda target: Suffix(corpus=CORPUS, tree=True, min_probability=0.01),
    "tree": lambda target: DraftTree(half_target(target), nodes=12, beam=3, candidates=3),
    "list": lambda target: Combined(("ngram", half_target(target))),
}


@pytest.mark.parametrize(("draft", "length"), in_turns(list(DRAFTS), [3, None]))
def test_sampled_texts_follow_the_targets_distribution(target, draft, length):
    torch.manual_seed(3)
    model = AssistedModelForCausalLM.from_models(target, draft=DRAFTS[draft](target), draft_length=length)
    model.reset_totals()
    written = []
    for _ in range(2):
        output = model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            num_return_sequences=SEQUENCES // 2,
            logits_processor=[GrammarProcessor(lambda: Automaton(EDGES, end=STOP, size=SIZE))],
        )
        written += torch.nn.functional.pad(
            output[:, PROMPT.shape[1] :], (0, NEW - output.shape[1] + PROMPT.shape[1])
        ).tolist()
    assert model.totals.accepted > 0
    expected = enumerated(target)
    places = {tuple([*text, *[0] * (NEW - len(text))]): number for number, text in enumerate(expected)}
    observed = torch.bincount(torch.tensor([places[tuple(text)] for text in written]), minlength=len(places))
    assert p_value(observed, torch.tensor(list(expected.values()), dtype=torch.float64)) > ALPHA


def test_the_enumeration_is_a_distribution(target):
    assert sum(enumerated(target).values()) == pytest.approx(1)


# --- schemas

FIGURES = json.loads((Path(__file__).parent.parent / "benchmarks" / "schemas.json").read_text())


@pytest.mark.parametrize("row", FIGURES["rows"], ids=lambda row: row["case"])
def test_schemas_that_libraries_read_otherwise_are_named(row):
    """What was measured with the libraries is what `check_schema` says, also within a larger schema."""
    inside = {"type": "object", "properties": {"x": {"type": "array", "items": row["schema"]}}}
    for library in FIGURES["about"]:
        found = row[library]
        differs = bool(found.get("forbids") or found.get("allows"))
        if "error" not in found:
            assert bool(check_schema(json.dumps(row["schema"]), library)) == differs
            if row["case"] != "a number alone":
                expected = [f"#/properties/x/items{said[1:]}" for said in check_schema(row["schema"], library)]
                assert check_schema(inside, library) == expected


def test_check_schema_names_its_arguments():
    with pytest.raises(ValueError, match="library: 'outlines' is not known here"):
        check_schema({}, "outlines")
    with pytest.raises(ValueError, match="schema: a JSON object was expected, and this is 3"):
        check_schema("3", "xgrammar")
    assert check_schema({"enum": [{"maxItems": 2}], "default": {"required": ["a"]}}, "outlines-core") == []


# --- libraries


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    }
)
PROMPTS = ["def mean(values):\n", "class Queue:\n    def push(self, item):\n", "import os\n\n"]


@pytest.fixture(scope="module")
def shipped():
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=["suffix", "zoo:draft"], dtype=torch.float32)
    model.tokenizer.padding_side = "left"
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.eos_token
    return model


def xgrammar_hf(model):
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    information = xgrammar.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(information).compile_json_schema(SCHEMA)
    return lambda: hf.LogitsProcessor(grammar)


def xgrammar_matcher(model, **options):
    xgrammar = pytest.importorskip("xgrammar")
    information = xgrammar.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(information).compile_json_schema(SCHEMA)
    return lambda: GrammarProcessor(lambda: xgrammar.GrammarMatcher(grammar, **options))


def llguidance_matcher(model):
    llguidance = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    tokens = hf.from_tokenizer(model.tokenizer, n_vocab=model.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    return lambda: GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar))


def outlines_backend(module, name):
    def make(model):
        outlines = pytest.importorskip("outlines")
        backend = pytest.importorskip(f"outlines.backends.{module}")
        made = getattr(backend, name)(outlines.from_transformers(model.target, model.tokenizer))
        return lambda: made.get_json_schema_logits_processor(SCHEMA)

    return make


LIBRARIES = {
    "xgrammar": xgrammar_hf,
    "xgrammar's matcher": xgrammar_matcher,
    "xgrammar's matcher, without a stop token": functools.partial(xgrammar_matcher, terminate_without_stop_token=True),
    "llguidance": llguidance_matcher,
    "outlines, outlines_core": outlines_backend("outlines_core", "OutlinesCoreBackend"),
    "outlines, xgrammar": outlines_backend("xgrammar", "XGrammarBackend"),
    "outlines, llguidance": outlines_backend("llguidance", "LLGuidanceBackend"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_processors_of_libraries(library, shipped):
    make = LIBRARIES[library](shipped)
    assert grammar_of(make()) is not None
    for prompts, ends in itertools.product((PROMPTS[:1], PROMPTS), ({}, {"eos_token_id": None})):
        inputs = shipped.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        call = {**inputs, "max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, **ends}
        plain = shipped.target.generate(**call, logits_processor=[make()])
        processor = make()
        assert shipped.generate(**call, logits_processor=[processor]).tolist() == plain.tolist()
        assert shipped.report.accepted > 0
        assert grammar_of(processor) is None  # it is in use
        text = shipped.tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text.lstrip().startswith("{")
    texts, call = [torch.tensor(shipped.tokenizer(one).input_ids) for one in PROMPTS], {"max_new_tokens": 64}
    found = shipped.generate_many(texts, rows=2, do_sample=False, logits_processor=[make()], **call)
    for answer in found:
        one = texts[answer.index][None]
        plain = shipped.target.generate(one, do_sample=False, logits_processor=[make()], **call)
        assert answer.ids.tolist() == plain[0].tolist()
    assert shipped.report.accepted > 0


def _xgrammar_texts(model, texts, **options):
    xgrammar = pytest.importorskip("xgrammar")
    information = xgrammar.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=model.config.vocab_size)
    grammar = " | ".join(map(json.dumps, texts)).join(("root ::= ", ""))
    compiled = xgrammar.GrammarCompiler(information).compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
    return lambda: xgrammar.GrammarMatcher(compiled, **options)


def _llguidance_texts(model, texts):
    llguidance = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    tokens = hf.from_tokenizer(model.tokenizer, n_vocab=model.config.vocab_size)
    grammar = " | ".join(map(json.dumps, texts)).join(("start: ", ""))
    return lambda: llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))


def _outlines_core_texts(model, texts):
    outlines_core = pytest.importorskip("outlines_core")
    end, known = model.tokenizer.eos_token_id, {}
    for token in range(1, model.config.vocab_size):
        known.setdefault(model.tokenizer.decode([token]), []).append(token)
    index = outlines_core.Index("|".join(map(re.escape, texts)), outlines_core.Vocabulary(end, known))
    return lambda: outlines_core.Guide(index)


WITH_TEXTS = {
    "xgrammar": _xgrammar_texts,
    "xgrammar, without a stop token": functools.partial(_xgrammar_texts, terminate_without_stop_token=True),
    "llguidance": _llguidance_texts,
    "outlines_core": _outlines_core_texts,
}


@pytest.mark.parametrize("texts", [("[1, 23]", "[4]", "[1, 23, 45, 67]"), ("",)], ids=["some", "empty"])
@pytest.mark.parametrize("library", WITH_TEXTS)
def test_the_text_ends_with_the_grammar(library, texts, shipped):
    matcher, tokenizer, pool = WITH_TEXTS[library](shipped, texts), shipped.tokenizer, SessionPool()
    for prompts, ends in ((PROMPTS[:1], 0), (PROMPTS, 0), (PROMPTS, None)):
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        call = {**inputs, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": ends}
        plain = shipped.target.generate(**call, logits_processor=[GrammarProcessor(matcher)])
        for more in ({}, {"sessions": pool}, {"draft_length": 3, "sessions": pool}, {"do_sample": True}):
            found = shipped.generate(**{**call, **more}, logits_processor=[GrammarProcessor(matcher)])
            new = found[:, inputs.input_ids.shape[1] :]
            assert (new[:, -1] == 0).all()  # the end token, or a pad
            assert new.shape[1] == 16 or ends is not None
            assert set(tokenizer.batch_decode(new, skip_special_tokens=True)) <= set(texts)
            assert "do_sample" in more or found.equal(plain)


@pytest.mark.parametrize("options", [{}, {"terminate_without_stop_token": True}])
def test_an_xgrammar_matcher_for_another_vocabulary_is_an_error(options, shipped):
    xgrammar = pytest.importorskip("xgrammar")
    size = shipped.config.vocab_size + 64
    information = xgrammar.TokenizerInfo.from_huggingface(shipped.tokenizer, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(information).compile_json_schema(SCHEMA)
    processor = GrammarProcessor(lambda: xgrammar.GrammarMatcher(grammar, **options))
    with pytest.raises(ValueError, match=f"another size than the {size - 64} logits"):
        shipped.generate(torch.tensor([[5, 6]]), max_new_tokens=4, logits_processor=[processor])


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_masks_after_rollback_are_those_of_fresh_matchers(library, shipped):
    make = LIBRARIES[library](shipped)
    size, start = shipped.config.vocab_size, torch.zeros(1, 1, dtype=torch.int64)
    text = '{"name": "ab", "size": 12, "tags": ["red"]}'
    tokens = [shipped.tokenizer.convert_tokens_to_ids(char.replace(" ", "Ġ")) for char in text]
    used = grammar_of(make())
    used.begin(start, size)
    generator = torch.Generator().manual_seed(0)
    for count in [*torch.randint(0, len(tokens), (30,), generator=generator).tolist(), len(tokens)]:
        wrong = int(torch.randint(0, size, (1,), generator=generator))
        used.mask(0, (*tokens[:count], wrong))
        fresh = grammar_of(make())
        fresh.begin(start, size)
        assert used.mask(0, tuple(tokens[:count])).equal(fresh.mask(0, tuple(tokens[:count])))


class WithoutRollback:
    """As llguidance.LLMatcher with a grammar of digits that has `max_tokens=` or `stop=`."""

    def __init__(self, tokens=(), error=False):
        self.tokens, self.error = [*tokens], error

    def deep_copy(self):
        return WithoutRollback(self.tokens, self.error)

    def try_consume_tokens(self, tokens):
        self.tokens += tokens if tokens[0] < 10 else []
        return int(tokens[0] < 10)

    def rollback(self, count):
        self.error = True
        return False

    def is_error(self):
        return self.error

    def is_accepting(self):
        return False

    is_stopped = is_accepting


def test_a_grammar_of_llguidance_that_takes_nothing_back():
    matcher = LLGuidance(WithoutRollback())
    assert [matcher.advance(token) for token in (1, 2, 11, 3)] == [True, True, False, True]
    matcher.rollback(2)
    assert matcher.advance(4)
    matcher.settle()
    assert matcher.advance(5) and matcher.advance(6)
    matcher.rollback(1)
    assert (matcher.matcher.tokens, matcher.matcher.error) == ([1, 4, 5], False)


@pytest.mark.parametrize("rule", ['stop=";"', "max_tokens=3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_limits_of_llguidance(rule, rows, shipped):
    llguidance = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    tokens = hf.from_tokenizer(shipped.tokenizer, n_vocab=shipped.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_lark(f'start: "return " body "!" body\nbody[{rule}]: /.*/')
    inputs = shipped.tokenizer(PROMPTS[:rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    call = {**inputs, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain, found = (
        model.generate(**call, logits_processor=[GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar))])
        for model in (shipped.target, shipped)
    )
    assert found.equal(plain) and shipped.report.accepted


def test_an_invalid_grammar_of_llguidance_is_an_error(shipped):
    llguidance = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    tokens = hf.from_tokenizer(shipped.tokenizer, n_vocab=shipped.config.vocab_size)
    with pytest.raises(ValueError, match="llguidance cannot go on"):
        shipped.generate(
            torch.tensor([[5, 6]]),
            max_new_tokens=4,
            logits_processor=[GrammarProcessor(lambda: llguidance.LLMatcher(tokens, "start: %bad((("))],
        )


def test_a_library_whose_code_was_replaced_is_not_recognised(shipped, monkeypatch):
    make = xgrammar_hf(shipped)
    processor = make()
    monkeypatch.setattr(type(processor), "__call__", lambda self, input_ids, scores: scores)
    assert grammar_of(processor) is None
