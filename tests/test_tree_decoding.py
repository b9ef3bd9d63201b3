"""Trees in the loop: end tokens and the end of the context within a path. What else sees a text is in test_traps.py.

The drafters of these tests know what plain decoding writes and hide it in random trees, so that paths of several nodes
are accepted, in other rows at other times.
"""

import pytest
import torch
from architectures import build
from covering import in_turns, one_in
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt
from test_sampling import PROMPT, VOCABULARY, require_distribution, tiny, towards
from trees import Planted

from assisted import AssistedModelForCausalLM, Merged, Suffix
from assisted.core import acceptance
from assisted.core.drafts import Draft
from assisted.distribution import probabilities
from assisted.methods.shared.base import Drafter, Drafting

NEW_TOKENS = 20
ROWS = [1, 3]


pytestmark = pytest.mark.usefixtures("invariants")


def both(target, call, rounds=4):
    """The same call plainly and with planted trees, several times; returns the plain output and all others."""
    call = CALL | {"max_new_tokens": NEW_TOKENS} | call
    ids = call.pop("ids")
    plain = target.generate(ids, **call)
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=5)
    outputs = []
    for seed in range(rounds):
        model.drafter = Planted(plain, seed)
        with no_fallback():
            outputs.append(model.generate(ids, **call))
    assert model.totals.accepted > 0
    return plain, outputs


@pytest.mark.parametrize(
    ("name", "ends", "rows"),
    [("llama", None, 1), ("llama", ENDS, 3), ("gemma3", ENDS, 1), ("mistral-window", None, 3), ("qwen3_moe", ENDS, 3)],
)
def test_end_tokens_and_the_last_token_within_a_path(name, rows, ends):
    target = build(BY_NAME[name])
    for new_tokens in (NEW_TOKENS, 5, 3):
        plain, ours = both(target, prompt(rows) | {"eos_token_id": ends, "max_new_tokens": new_tokens})
        assert all(output.tolist() == plain.tolist() for output in ours)


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
    target = tiny(0)
    return target, towards(target, tiny(1))


SAMPLED = 4  # the first, a path of two and a bonus


@pytest.mark.parametrize(
    "setting,replacement", in_turns([{}, {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.5}], [False, True])
)
def test_drawn_trees_follow_the_targets_distribution(small, setting, replacement):
    target, draft = small
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)
    model.drafter = Drawn(draft, replacement)
    require_distribution(model, 31, SAMPLED, 10_000, **setting)


@pytest.mark.parametrize("setting", one_in(2, [{"temperature": 0.6, "repetition_penalty": 1.3}, {}]))
def test_merged_drafters_follow_the_targets_distribution(small, setting):
    """Two models and a copier: draws of two distributions and certain tokens at one node."""
    target, draft = small
    text = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
    members = (Suffix(corpus=text, tree=True, min_probability=0.01), draft, tiny(2))
    model = AssistedModelForCausalLM.from_models(target, draft=Merged(members), draft_length=2)
    require_distribution(model, 33, SAMPLED, 10_000, **setting)


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
