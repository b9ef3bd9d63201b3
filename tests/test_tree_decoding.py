"""Trees in the loop: whatever ends or watches a text, it sees what plain decoding shows it.

The drafters of these tests know what plain decoding writes and hide it in random trees, so that paths of several nodes
are accepted, in other rows at other times.
"""

import random

import pytest
import torch
from architectures import build, half_right
from covering import in_turns, one_in
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, tokenizer
from test_sampling import ALPHA, PROMPT, VOCABULARY, counts, exact_distribution, p_value, tiny
from test_text import Streamer
from test_traps import Remembers

from assisted import AssistedModelForCausalLM, Merged, Suffix, acceptance
from assisted.distribution import probabilities
from assisted.drafters.base import Drafter, Drafting
from assisted.drafts import Draft

NEW_TOKENS = 20
NODES = 10
ROWS = [1, 3]


pytestmark = pytest.mark.usefixtures("invariants")


class Planted(Drafter, Drafting):
    """Random trees that hold the first tokens of `truth` [B, L] somewhere, among wrong branches and twins."""

    def __init__(self, truth, seed=0):
        self.truth = truth.tolist()
        self.random = random.Random(seed)

    def start(self, call):
        assert call.target.masks.trees
        return self

    def propose(self, text, budget):
        trees = [self.tree(self.truth[row][text.lengths[row] :], budget) for row in range(text.rows)]
        width = max(map(len, trees))
        filler = [(-1, self.random.randrange(3, 90)) for _ in range(width)]
        nodes = torch.tensor([(tree + filler)[:width] for tree in trees]).view(text.rows, width, 2)
        return Draft(nodes[..., 1], torch.tensor([len(tree) for tree in trees]), parents=nodes[..., 0])

    def tree(self, truth, budget):
        nodes, depths, last, known = [], {-1: 0}, -1, 0
        for _ in range(self.random.randrange(2, NODES)):
            right = known < min(len(truth), budget) and self.random.random() < 0.6
            parent = last if right else self.random.randrange(-1, len(nodes))
            if depths[parent] == budget:
                continue
            token = truth[known] if right else self.random.choice([*range(3, 90), *truth[:budget]])
            depths[len(nodes)] = depths[parent] + 1
            if right:
                last, known = len(nodes), known + 1
            nodes.append((parent, token))
        return nodes


@pytest.fixture(scope="module")
def target():
    return build(BY_NAME["llama"])


def both(target, call, again=None, rounds=4):
    """The same call plainly and with planted trees, several times; returns the plain output and all others.

    again: the arguments that hold a state, made anew for every call.
    """
    call, again = CALL | {"max_new_tokens": NEW_TOKENS} | call, again or dict
    ids = call.pop("ids")
    plain = target.generate(ids, **call, **again())
    truth = plain if isinstance(plain, torch.Tensor) else plain.sequences
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target, noise=0.1), draft_length=5)
    outputs = []
    for seed in range(rounds):
        model.drafter = Planted(truth, seed)
        with no_fallback():
            outputs.append(model.generate(ids, **call, **again()))
    assert model.totals.accepted > 0
    return plain, outputs


@pytest.mark.parametrize("ends", [None, ENDS], ids=["endless", "ends"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "qwen3_moe"])
def test_end_tokens_and_the_last_token_within_a_path(name, rows, ends):
    target = build(BY_NAME[name])
    for new_tokens in (NEW_TOKENS, 5, 3):
        plain, ours = both(target, prompt(rows) | {"eos_token_id": ends, "max_new_tokens": new_tokens})
        assert all(output.tolist() == plain.tolist() for output in ours)


@pytest.mark.parametrize("ends", [None, ENDS], ids=["endless", "ends"])
@pytest.mark.parametrize("rows", ROWS)
def test_stop_strings_within_a_path(target, rows, ends):
    characters = tokenizer()
    whole = target.generate(**_named(prompt(rows)), **CALL | {"eos_token_id": ends})
    new = characters.batch_decode(whole[:, 12:])
    stops = [new[0][4:6], new[-1][7:9], "no such text"]
    call = {"stop_strings": stops, "tokenizer": characters, "eos_token_id": ends}
    plain, ours = both(target, prompt(rows) | call)
    assert rows > 1 or plain.shape[1] < whole.shape[1]
    assert all(output.tolist() == plain.tolist() for output in ours)


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.6},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "at least 15 tokens": {"min_new_tokens": 15},
    "an end that grows likely": {"exponential_decay_length_penalty": (6, 1.5)},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8, "bad_words_ids": [[7, 9]]},
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("setting", PROCESSORS)
def test_processors_see_the_path_to_each_node(target, setting, rows):
    plain, ours = both(target, prompt(rows) | {"eos_token_id": ENDS} | PROCESSORS[setting])
    assert all(output.tolist() == plain.tolist() for output in ours)


@pytest.mark.parametrize("ends", [None, ENDS], ids=["endless", "ends"])
@pytest.mark.parametrize("rows", ROWS)
def test_stateful_processors_see_each_prefix_once_in_order(target, rows, ends):
    seen = []

    def again():
        seen.append(Remembers())
        return {"logits_processor": [seen[-1]]}

    plain, ours = both(target, prompt(rows) | {"eos_token_id": ends}, again)
    assert all(output.tolist() == plain.tolist() for output in ours)
    assert all(other.seen == seen[0].seen for other in seen)


@pytest.mark.parametrize("rows", ROWS)
def test_streamers_hear_every_token_once(target, rows):
    heard = []

    class Heard(Streamer):
        def end(self):
            pass

    def again():
        heard.append(Heard())
        return {"streamer": heard[-1]}

    both(target, prompt(rows) | {"eos_token_id": ENDS}, again)
    assert all(other.tokens == heard[0].tokens for other in heard)


@pytest.mark.parametrize("rows", ROWS)
def test_scores_logits_and_cache_are_those_of_the_path(target, rows):
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call = prompt(rows) | details | {"repetition_penalty": 1.3}
    plain, ours = both(target, call)
    for output in ours:
        assert output.sequences.tolist() == plain.sequences.tolist()
        for name in ("scores", "logits"):
            for one, two in zip(getattr(output, name), getattr(plain, name), strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
        shown = call["attention_mask"].bool()[:, None, :, None]
        for one, two in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
            shown_too = torch.nn.functional.pad(shown, (0, 0, 0, two.keys.shape[2] - shown.shape[2]), value=True)
            for store in ("keys", "values"):
                difference = (getattr(one, store) - getattr(two, store)).where(shown_too, 0)
                assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trees_at_the_end_of_the_context(name):
    """Branches end where the context does: GPT-2 knows no position behind it."""
    target = build(BY_NAME[name], max_position_embeddings=24)
    plain, ours = both(target, prompt(3) | {"max_new_tokens": 12})
    assert plain.shape[1] == 24
    assert all(output.tolist() == plain.tolist() for output in ours)


# --- sampling


class Drawn(Drafter, Drafting):
    """Trees drawn from a model of their own: at most two levels, of a shape that differs from row to row."""

    SHAPE = (-1, -1, 0, 0, 1, 1, -1)

    def __init__(self, model, replacement):
        self.model, self.replacement = model, replacement

    def start(self, call):
        self.distribution = call.distribution
        return self

    def propose(self, text, budget):
        rows = text.rows
        shape = self.SHAPE if budget > 1 else (-1, -1, -1)
        parents = torch.tensor(shape).expand(rows, -1)
        sizes = torch.where(torch.arange(rows) % 2 == 0, len(shape), 2)
        behind = torch.tensor(text.lengths)
        ids = torch.nn.functional.pad(text.ids, (0, 3))
        draft, distributions = Draft.empty(rows), []
        for node, parent in enumerate(shape):
            path = [] if parent < 0 else [parent]
            for depth, above in enumerate(path):
                ids.scatter_(1, behind[:, None] + depth, draft.tokens[:, above : above + 1])
            logits = self.model(ids).logits[torch.arange(rows), behind - 1 + len(path)]
            scores = self.distribution.scores(text.ids, text.lengths, logits[:, None], draft, nodes=[parent])[:, 0]
            distributions.append(probabilities(scores))
            q = torch.stack(distributions, 1)
            tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
            sizes_so_far = torch.full((rows,), node + 1)
            if not self.replacement:
                q = acceptance.taken_out(tokens, parents[:, : node + 1], sizes_so_far, q)
            tokens[:, node] = acceptance.sample(q[:, node])
            draft = Draft(tokens, sizes_so_far, q, parents[:, : node + 1])
        return Draft(draft.tokens, sizes, draft.q, parents)


@pytest.fixture(scope="module")
def small():
    target, draft = tiny(0), tiny(1)
    with torch.no_grad():
        for weight, aim in zip(draft.parameters(), target.parameters(), strict=True):
            weight.lerp_(aim, 0.6)
    return target, draft


SAMPLED = 4  # the first, a path of two and a bonus


@pytest.mark.parametrize(
    "setting,replacement", in_turns([{}, {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.5}], [False, True])
)
def test_drawn_trees_follow_the_targets_distribution(small, setting, replacement):
    target, draft = small
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)
    model.drafter = Drawn(draft, replacement)
    torch.manual_seed(31)
    kwargs = {"top_k": 0} | setting
    many = {"max_new_tokens": SAMPLED, "do_sample": True, "num_return_sequences": 10_000}
    with no_fallback():
        sequences = model.generate(PROMPT, **many, **kwargs)
    assert 0 < model.report.accepted < model.report.drafted
    distribution = exact_distribution(target, SAMPLED, **kwargs)
    assert p_value(counts(sequences), distribution) > ALPHA


def test_trees_claimed_to_be_drawn_otherwise_are_found(small):
    """The test's own power: drawn without replacement, told to be drawn with it."""
    target, draft = small
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)

    class Wrong(Drawn):
        def propose(self, text, budget):
            found = super().propose(text, budget)
            first = torch.tensor([0, 0, 2, 2, 4, 4, 0])[: found.width]
            return Draft(found.tokens, found.lengths, found.q[:, first], found.parents)

    model.drafter = Wrong(draft, replacement=False)
    torch.manual_seed(32)
    many = {"max_new_tokens": SAMPLED, "do_sample": True, "num_return_sequences": 10_000}
    sequences = model.generate(PROMPT, top_k=0, **many)
    assert p_value(counts(sequences), exact_distribution(target, SAMPLED, top_k=0)) < ALPHA


@pytest.mark.parametrize("setting", one_in(2, [{"temperature": 0.6, "repetition_penalty": 1.3}, {}]))
def test_merged_drafters_follow_the_targets_distribution(small, setting):
    """Two models and a copier: draws of two distributions and certain tokens at one node."""
    target, draft = small
    text = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
    members = (Suffix(corpus=text, tree=True, min_probability=0.01), draft, tiny(2))
    model = AssistedModelForCausalLM.from_models(target, draft=Merged(members), draft_length=2)
    torch.manual_seed(33)
    kwargs = {"top_k": 0} | setting
    many = {"max_new_tokens": SAMPLED, "do_sample": True, "num_return_sequences": 10_000}
    with no_fallback():
        sequences = model.generate(PROMPT, **many, **kwargs)
    assert 0 < model.report.accepted < model.report.drafted
    assert p_value(counts(sequences), exact_distribution(target, SAMPLED, **kwargs)) > ALPHA


def test_stateful_processors_see_each_prefix_once_when_drawn_trees_are_judged(small):
    target, draft = small
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)
    model.drafter = Drawn(draft, True)
    torch.manual_seed(34)

    class Watches:
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.tolist())
            return scores

    for rows in ROWS:
        ours = Watches()
        with no_fallback():
            output = model.generate(
                PROMPT.repeat(rows, 1), max_new_tokens=20, do_sample=True, top_k=0, logits_processor=[ours]
            )
        assert ours.seen == [output[:, :length].tolist() for length in range(PROMPT.shape[1], output.shape[1])]
        assert model.report.accepted > 0


def _named(start):
    return {"inputs": start["ids"], "attention_mask": start["attention_mask"]}
