"""When to stop drafting: what a caller may write, what is refused, how policies are saved, and what they decide."""

import dataclasses
import json

import pytest
import torch

from assisted.core.drafts import Round
from assisted.lengths import Confidence, Costs, Fixed, from_dict, policies, resolve, to_dict
from assisted.lengths.adaptive import Adaptive

COSTS = Costs(((1, 0.004), (2, 0.005)), 0.001)
BORDERS = [Confidence(0), Confidence(1), Confidence(maximum=1)]

ONE = (0,)  # the rows of a batch of one


class Own:
    """A caller's policy: anything with `start`."""

    def start(self):
        raise NotImplementedError


def test_what_a_caller_may_write():
    for written in (None, "adaptive"):
        assert resolve(written) == Adaptive()
    assert resolve("confidence") == Confidence()
    assert [resolve(written) for written in (1, 7)] == [Fixed(1), Fixed(7)]
    for policy in (Fixed(3), Confidence(0.2, 5), Own()):
        assert resolve(policy) is policy


@pytest.mark.parametrize("written", ["fixed", "", "4", True, False, 2.0, [4], {"policy": "fixed"}, object()])
def test_what_is_not_known_is_refused(written):
    with pytest.raises(ValueError, match=r"draft_length: .* is not known; give a number of tokens"):
        resolve(written)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve(0), "draft_length: 0 is not possible; draft at least 1 token, or pass assisted=False"),
        (lambda: Fixed(-3), "draft_length: -3 is not possible"),
        (lambda: Confidence(threshold=-0.01), r"threshold: -0.01 is no probability; give a number in \[0, 1\]"),
        (lambda: Confidence(threshold=1.01), "threshold: 1.01 is no probability"),
        (lambda: Confidence(threshold=float("nan")), "threshold: nan is no probability"),
        (lambda: Confidence(maximum=0), "maximum: 0 is not possible; draft at least 1 token"),
        (lambda: Adaptive(maximum=0), "maximum: 0 is not possible; draft at least 1 token"),
        (lambda: Adaptive(margin=0.9), "margin: 0.9 would draft at a loss; give a speedup of at least 1"),
        (lambda: Adaptive(margin=float("nan")), "margin: nan would draft at a loss"),
        (lambda: Adaptive(draft_cost=-1.0), "draft_cost: -1.0 is no cost; give a share of a forward pass of the target"),
        (lambda: Adaptive(position_cost=float("nan")), "position_cost: nan is no cost"),
        (lambda: Adaptive(probe_every=0), "probe_every: 0 is not possible; give a number of tokens, at least 1"),
        (lambda: Costs((), 0.1), r"verify: \(\) are no costs; give pairs of positions \(ascending, from 1\) and seconds"),
        (lambda: Costs(((2, 0.1), (1, 0.1)), 0.1), "verify: .* are no costs"),
        (lambda: Costs(((0, 0.1),), 0.1), "verify: .* are no costs"),
        (lambda: Costs(((1, 0.0),), 0.1), "verify: .* are no costs"),
        (lambda: Costs(((1, 0.1),), -0.1), "draft: -0.1 is no cost; give the seconds of a forward pass of the draft"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("policy", [*BORDERS, Fixed(1), Adaptive(1, 1, 1)])
def test_the_borders_are_inside(policy):
    assert policy.start().budget(ONE) >= 1


@pytest.mark.parametrize(
    "policy", [Fixed(), Fixed(7), Confidence(), Confidence(0.25, 3), Adaptive(), Adaptive(8, 1.1, 20, COSTS)]
)
def test_saved_policies_come_back(policy):
    fields = to_dict(policy)
    assert from_dict(json.loads(json.dumps(fields))) == policy
    assert fields["policy"] in policies()


def test_saving_a_default_and_what_is_not_ours():
    assert to_dict(Own()) is None
    assert from_dict(None) == resolve(None)
    fields = {"policy": "oracle", "depth": 3}
    with pytest.raises(ValueError, match="draft_length: the saved policy 'oracle' is not known in this version"):
        from_dict(fields)
    assert fields == {"policy": "oracle", "depth": 3}


def distribution_of(*largest):
    """[B, 4]: a distribution for each row whose largest probability is the given one."""
    q = torch.tensor(largest)[:, None]
    return torch.cat([q, (1 - q).expand(-1, 3) / 3], 1)


def test_fixed_always_goes_on():
    length = Fixed(3).start()
    assert length.budget(ONE) == 3
    assert not length.needs_q
    length.observe(Round.counted([(3, 0, 1), (3, 0, 1)], 1.0, 1.0))
    assert length.budget(ONE) == 3
    assert length.run_again(2)
    assert length.go_on(1, distribution_of(0.25, 1.0)).tolist() == [True, True]


@pytest.mark.parametrize(("threshold", "goes_on"), [(0.0, [1, 1, 1, 1]), (0.5, [0, 1, 1, 1]), (1.0, [0, 0, 0, 1])])
def test_confidence_stops_below_its_threshold(threshold, goes_on):
    length = Confidence(threshold, maximum=6).start()
    assert length.budget(ONE) == 6
    assert length.needs_q
    length.observe(Round.counted([(6, 0, 1)], 1.0, 1.0))
    assert length.budget(ONE) == 6
    q = distribution_of(0.25, 0.5, 0.75, 1.0)  # each row on its own
    assert length.go_on(0, q).all()  # one token is always proposed
    for position in (1, 5):
        assert length.go_on(position, q).tolist() == [bool(flag) for flag in goes_on]


@pytest.mark.parametrize("policy", [Fixed(2), Confidence(), Adaptive()])
def test_policies_are_frozen_and_start_afresh(policy):
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.maximum = 1
    assert policy.start() is not policy.start()


def test_a_lookup_of_few_rows_is_cut_to_what_it_is_worth():
    """Every column is computed for all rows. What one row of eight has found costs more than it saves."""
    length, rows = Adaptive().start(), range(8)
    found = [8] + [0] * 7
    length.budget(rows)
    assert length.fit(found) == 8  # nothing is known yet
    for drafted in [0, 4, 0, 4] * 20:
        length.budget(rows)
        each = (drafted, drafted, drafted + 1)
        length.observe(Round.counted([each] * 8, 0.0001, 0.010 + 0.002 * drafted, asked=drafted > 0))
    length.budget(rows)
    assert length.fit([8] * 8) == 8
    assert length.fit([16] * 8) == 9  # at most twice the positions that were timed, the committed one among them
    assert length.fit(found) == length.fit([0] * 8) == 0
    assert 0 < length.fit([8] * 7 + [2]) <= 8
    length.known.credit = 0.0
    length.budget(rows)
    assert length.fit(found) == 1  # a probe
    length.budget(ONE)
    assert length.fit([8]) == 8


def test_a_length_may_be_known_before_the_draft():
    assert Fixed(4).start().ahead(3) == 3
    assert Confidence().start().ahead(8) is None
    length = Adaptive(costs=COSTS).start()
    length.budget(ONE)
    assert length.ahead(8) is None  # nothing is captured
    length.prompt_read(100, columns=lambda count, rows: 8 if count > 1 else 1)
    assert [length.ahead(most) for most in (1, 2, 7)] == [1, 2, 2]
