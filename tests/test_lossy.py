"""Typical acceptance: the rule as written, and that it is lossy, which is why it has to be asked for by name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import CALL, pair
from test_sampling import ALPHA, NEW_TOKENS, PROMPT, SEQUENCES, counts, exact_distribution, p_value
from test_sampling import pair as sampled_pair  # noqa: F401  a fixture
from trees import any_parents, walk

from assisted import LossyTypical
from assisted.core.drafts import Draft

VOCABULARY, NODES = 6, 5


@given(any_parents(2, NODES), st.integers(0, 10_000), st.sampled_from([(0.09, 0.3), (0.5, 1.0), (0.02, 0.05)]))
def test_the_longest_path_of_typical_tokens_is_kept(parents, seed, numbers):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, NODES), generator=generator)
    lengths = torch.randint(NODES + 1, (2,), generator=generator)
    p = torch.softmax(3 * torch.randn(2, NODES + 1, VOCABULARY, generator=generator), -1)
    p[0, 0, 0] = 0.0  # what the target forbids is never typical
    path, verdict = LossyTypical(*numbers).judge(Draft(tokens, lengths, parents=torch.tensor(parents)), p)
    for row in range(2):

        def typical(node, row=row):
            distribution = p[row, parents[row][node] + 1].tolist()
            entropy = -sum(x * math.log(x) for x in distribution if x)
            return distribution[tokens[row, node]] > min(numbers[0], numbers[1] * math.exp(-entropy))

        drafted = range(int(lengths[row]))
        kept = [walk(parents[row], node) for node in drafted]
        # nodes of the padding may stand between: a path through them is none
        kept = [nodes for nodes in kept if all(node in drafted and typical(node) for node in nodes)]
        longest = max(map(len, kept), default=0)
        found = [node for node in path[row].tolist() if node >= 0]
        assert len(found) == longest == int(verdict.accepted[row])
        assert not found or found in kept
        assert p[row, found[-1] + 1 if found else 0, verdict.token[row]] > 0


def test_it_is_lossy(sampled_pair):  # noqa: F811
    """The chi-square that every exact rule passes fails."""
    target, model = sampled_pair
    torch.manual_seed(14)
    many = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "num_return_sequences": SEQUENCES, "top_k": 0}
    model.reset_totals()
    exact = model.generate(PROMPT, draft_length=2, **many)
    before = model.totals.acceptance_rate
    model.reset_totals()
    lossy = model.generate(PROMPT, draft_length=2, lossy_typical=LossyTypical(), **many)
    assert model.totals.acceptance_rate > before
    distribution = exact_distribution(target, top_k=0)
    assert p_value(counts(exact), distribution) > ALPHA
    assert p_value(counts(lossy), distribution) < ALPHA


def test_nothing_is_typical_above_certainty():
    """With epsilon 1 only what is certain is kept: what is left is plain sampling."""
    p = torch.tensor([[[0.9, 0.1], [0.0, 1.0]]])
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]))
    _, verdict = LossyTypical(epsilon=1.0, delta=10.0).judge(draft, p)
    assert verdict.accepted.tolist() == [0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"do_sample": False}, r"^lossy_typical: greedy decoding"),
        ({"do_sample": True, "assisted": False}, r"^lossy_typical: has no effect without drafts"),
        (
            {"do_sample": True, "logits_processor": [lambda input_ids, scores: scores]},
            r"^lossy_typical: does not work with logits",
        ),
    ],
)
def test_where_it_means_nothing_it_is_refused(more, message):
    model = pair("llama")[1]
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[5, 6, 7]]), lossy_typical=LossyTypical(), **(CALL | more))


@pytest.mark.parametrize("numbers", [{"epsilon": 0.0}, {"epsilon": 1.5}, {"delta": 0.0}])
def test_numbers_that_are_none(numbers):
    with pytest.raises(ValueError, match=rf"^{next(iter(numbers))}: "):
        LossyTypical(**numbers)
