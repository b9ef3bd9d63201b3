"""The adaptive draft length: what it makes of a simulated pair, what it learns, when it gives up and when it tries again."""

import copy
import dataclasses
import itertools
import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulation
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from covering import in_turns, one_in
from simulation import HOPELESS, PAIRS, Pair, Source, distributions, oracle, simulate

from assisted import AssistedModelForCausalLM, generation
from assisted.calls.costs import share_of_weights
from assisted.core.drafts import Round
from assisted.engine.runner import CachedModel
from assisted.lab.bench import held_out_prompts
from assisted.lengths import Confidence, Costs, Fixed, from_dict, to_dict
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.cost_model import Timings
from assisted.lengths.rates import Acceptance
from assisted.methods.combined import CombinedLength, Member
from assisted.methods.shared.runner import HeadRunner
from benchmarks import simulated

TOKENS = 2000
SOURCES = {
    "switching": Source(),
    "long stretches": Source(stretches=(300.0, 150.0), confidences=((30.0, 1.0), (2.0, 4.0)), power=1.0),
    "one regime": Source(stretches=(1e9, 1.0), confidences=((4.0, 1.5), (2.0, 4.0)), power=1.0),
    "confidence says nothing": Source(stretches=(1e9, 1.0), confidences=((3.0, 3.0), (2.0, 4.0)), power=0.0, scale=0.7),
}
WRITTEN = 128  # tokens of each text of the shipped pair
STEP = Pair(0.12, 0.005, first_column=0.2)  # a pass over two tokens costs more, over more of them hardly
START = Pair(0.1, 0.02, start=0.3)  # a draft of two tokens costs little more than one of one

ONE = (0,)  # the rows of a batch of one


def text(source, tokens=TOKENS, seed=0):
    return source.text(tokens + 64, seed)


@pytest.mark.parametrize("pair,name", in_turns([*PAIRS, STEP, START], list(SOURCES)))
def test_close_to_the_rule_tuned_in_hindsight(pair, name):
    """Within 3% of the best fixed length, threshold or both, and no slower than plain decoding. Where not even hindsight
    gains more than the margin asks for, giving up is right."""
    seeds, source = (0, 1), SOURCES[name]
    speedup = sum(simulate(Adaptive(), pair, [text(source, seed=seed)], TOKENS, seed).speedup for seed in seeds) / 2
    best = sum(oracle(pair, source, TOKENS, seed)[0] for seed in seeds) / 2
    assert speedup >= 0.98
    if best > 1.04:
        assert speedup >= 0.97 * best


@pytest.mark.parametrize("pair", one_in(2, [*PAIRS, STEP, START]))
def test_unsure_distributions_that_overlap_are_tried(pair):
    """Of drawn tokens, those of low confidence may be accepted as often as any: nothing is known of them before they are
    proposed. Between the first calls of a pair and the best rule in hindsight lies what is learned on the way."""
    source = Source(stretches=(1e9, 1.0), confidences=((1.5, 6.0), (2.0, 4.0)), power=0.0, scale=0.75)
    best = oracle(pair, source, TOKENS, 0)[0]
    assert simulate(Adaptive(), pair, [text(source)], TOKENS, sampled=True).speedup >= 0.95 * best


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_hopeless_draft_costs_next_to_nothing(pair):
    assert simulate(Adaptive(), pair, [text(HOPELESS, 4000)], 4000).speedup >= 0.98
    short = [simulate(Adaptive(), pair, [text(HOPELESS, 256, seed)], 256, seed).speedup for seed in range(5)]
    assert min(short) >= 0.96
    # each probe of the later pauses is one token, and at least 50 tokens lie between two
    tokens = text(HOPELESS, 1000)
    late = [at for at in simulate(Adaptive(), Pair(0.6, 0.05), [tokens], 1000).drafted_at if at > 300]
    assert len(late) > 5
    was_right = [at for at in late if tokens[at][1]]  # by chance, after which it is tried again
    assert len(was_right) <= 1
    assert all(after - before >= 50 for before, after in itertools.pairwise(late) if before not in was_right)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_draft_that_turns_good_is_switched_on_again(pair):
    source = SOURCES["long stretches"]
    both = HOPELESS.text(1500) + text(source)
    bad = simulate(Adaptive(), pair, [both], 1500).seconds
    good = simulate(Adaptive(), pair, [both], 1500 + TOKENS).seconds - bad
    assert TOKENS / good >= 0.93 * oracle(pair, source, TOKENS)[0]


def test_a_draft_that_turns_hopeless_is_switched_off():
    source = SOURCES["long stretches"]
    both = source.text(1500) + text(HOPELESS)
    good = simulate(Adaptive(), PAIRS[1], [both], 1500)
    whole = simulate(Adaptive(), PAIRS[1], [both], 1500 + TOKENS)
    assert TOKENS / (whole.seconds - good.seconds) >= 0.97
    assert whole.length.predicted_speedup < 1.03


@pytest.mark.parametrize(
    "pair,name", in_turns([*PAIRS, STEP, START], ["switching", "long stretches", "confidence says nothing"])
)
def test_a_batch_is_no_slower_than_its_best_fixed_length(pair, name):
    texts = [text(SOURCES[name], 1500, seed) for seed in range(4)]
    best = max(simulate(Fixed(n), pair, texts, 1500).speedup for n in (1, 2, 3, 4, 6, 8))
    speedup = simulate(Adaptive(), pair, texts, 1500).speedup
    assert speedup >= 0.96 * max(1.0, best)


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], STEP], ids=str)
def test_a_drafter_that_proposes_blocks(pair):
    """It never asks: only its budget is chosen. The best one is found, and hopeless blocks are switched off."""
    source = SOURCES["one regime"]
    best = max(simulate(Fixed(n), pair, [text(source)], TOKENS, asks=False).speedup for n in (1, 2, 4, 8, 12, 16))
    run = simulate(Adaptive(), pair, [text(source)], TOKENS, asks=False)
    assert run.speedup >= 0.95 * best
    assert simulate(Adaptive(), pair, [text(HOPELESS)], TOKENS, asks=False).speedup >= 0.98


def test_a_batch_in_which_few_rows_find_something():
    """All rows pay for the columns of the longest draft."""
    pair, source = Pair(0.05, 0.15), SOURCES["one regime"]
    texts = [text(source, 1500, seed) for seed in range(8)]

    def speedup(policy):
        return simulate(policy, pair, texts, 1500, asks=False, found=0.3).speedup

    assert speedup(Adaptive()) >= 0.96 * max(1.0, *(speedup(Fixed(n)) for n in (1, 2, 3, 4)))


CARDS = json.loads((Path(simulated.__file__).parent / "simulated.json").read_text(encoding="utf-8"))["scenarios"]


@pytest.mark.parametrize("name", one_in(5, list(CARDS)))
def test_on_cards_and_with_prompts_to_read_it_keeps_up_with_the_best_fixed_length(name):
    """Whose speedup is in the committed figures: in simulated seconds, they are the same everywhere."""
    assert simulated.cards()[name](Adaptive(), 1) >= 0.97 * CARDS[name]["best fixed"]


@pytest.mark.parametrize(
    "name",
    [
        "7 billion, cheap draft, switching, 32 calls of 1 x 64",
        "7 billion, cheap draft, poor, 32 calls of 8 x 64",
        "1 billion, usual draft, switching, 32 calls of 8 x 64",
        "expensive draft, informative, 32 calls of 1 x 64",
        "16,384 tokens of context, poor, 32 calls of 64",
    ],
)
def test_a_length_that_is_chosen_before_a_draft_costs_less_than_waiting_for_the_device(name):
    waits, at_once = (simulated.cards(16, simulated.HOST, whole)[name](Adaptive(), 1) for whole in (False, True))
    assert at_once >= 0.99 * waits


def test_short_calls_profit_from_earlier_ones():
    source, pair = SOURCES["switching"], PAIRS[1]
    cold = warm = 0.0
    earlier = None
    for seed in range(12):
        cold += simulate(Adaptive(), pair, [text(source, 48, seed)], 48, seed).seconds
        run = simulate(Adaptive(), pair, [text(source, 48, seed)], 48, seed, earlier)
        earlier, warm = run.length, warm + run.seconds
    assert warm < cold
    off = simulate(Adaptive(), pair, [text(HOPELESS, 1000)], 1000).length
    assert simulate(Adaptive(), pair, [text(HOPELESS, 48)], 48, earlier=off).drafted <= 2


def test_a_call_does_not_change_what_it_started_from():
    first = simulate(Adaptive(), PAIRS[1], [text(Source())], 500).length
    costs, speedup = first.costs, first.predicted_speedup
    runs = [simulate(Adaptive(), PAIRS[1], [text(Source())], 500, earlier=first) for _ in range(2)]
    assert (first.costs, first.predicted_speedup) == (costs, speedup)
    assert runs[0].seconds == runs[1].seconds


def test_of_another_policy_nothing_is_taken_over():
    assert Adaptive().start(Confidence().start()).costs is None


def test_what_is_measured():
    pair = Pair(0.3, 0.02, prompt=50.0)  # reading the prompt is no part of a token's cost
    length = simulate(Adaptive(), pair, [text(Source())], TOKENS).length
    assert length.costs.draft == pytest.approx(0.3, rel=0.05)
    for columns in (1, 2, 4, 8):
        assert length.costs.verify_seconds(columns) == pytest.approx(pair.verify(columns), rel=0.1)
    run = simulate(Adaptive(), pair, [text(SOURCES["one regime"])], TOKENS)
    assert run.length.predicted_speedup == pytest.approx(TOKENS / (run.seconds - pair.prompt), rel=0.15)


def test_of_a_draft_its_start_and_each_further_forward_are_measured():
    length = simulate(Adaptive(), START, [text(Source())], TOKENS).length
    draft = length.known.draft
    assert [draft.at(n) for n in (1, 2, 4)] == pytest.approx([START.drafting(n) for n in (1, 2, 4)], rel=0.1)
    assert draft.step == pytest.approx(0.1, rel=0.1)
    assert 0.1 < length.costs.draft < 0.4  # on average
    block = simulate(Adaptive(), PAIRS[1], [text(Source())], TOKENS, asks=False).length
    assert block.costs.draft == pytest.approx(0.0001, rel=0.1)  # of a whole one


def test_nothing_is_predicted_before_costs_are_known():
    length = Adaptive().start()
    assert length.predicted_speedup is None
    assert length.costs is None
    assert length.budget(ONE) == 1


@pytest.mark.parametrize(("share", "tokens"), [(0.05, 16), (0.9, 1)])
def test_the_draft_costs_its_share_of_the_weights_until_it_is_measured(share, tokens):
    """Once a pass over one token is known, a dear draft ends before its second token, a cheap one goes on to the maximum."""
    length = Adaptive(draft_cost=share).start()
    assert from_dict(json.loads(json.dumps(to_dict(length.policy)))) == length.policy
    for _ in range(2):
        length.observe(Round.counted([(0, 0, 1)], 0.0, 1.0))
    length.budget(ONE)
    assert length.go_on(0, distributions([0.8])).all()
    drafted = 1
    while drafted < 16 and length.run_again(drafted) and length.go_on(drafted, distributions([0.99])).all():
        drafted += 1
    assert drafted == tokens


def test_a_pair_knows_its_share_of_weights():
    target = build(ARCHITECTURES[0])
    pair = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    assert share_of_weights(pair) == pytest.approx(1.0, rel=0.01)  # the same size
    assert share_of_weights(AssistedModelForCausalLM.from_models(target, draft="ngram")) is None
    call = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    pair.generate(random_ids(target, 1, 8), **call)
    assert pair.length.policy.draft_cost == pytest.approx(1.0, rel=0.01)
    assert pair.draft_length == Adaptive()  # the caller's stays as it is


def test_costs_are_saved_with_the_policy():
    costs = simulate(Adaptive(), PAIRS[1], [text(Source())], 500).length.costs
    policy = Adaptive(costs=costs)
    assert from_dict(json.loads(json.dumps(to_dict(policy)))) == policy
    length = policy.start()
    assert length.costs == costs
    # what a forward costs is known from the first round on: nothing is drafted that can't pay
    dear = Adaptive(costs=Costs(((1, 1.0), (2, 1.1)), 5.0)).start()
    dear.budget(ONE)
    dear.go_on(0, distributions([0.9]))
    assert not dear.run_again(1)
    # and is forgotten as soon as this machine's own is
    for _ in range(8):
        length.observe(Round.counted([(0, 0, 1)], 0.0, 7.0))
        length.observe(Round.counted([(1, 1, 2)], 0.0, 8.0))
    assert dict(length.costs.verify)[1] == 7.0


def learned(rows=1, confidence=0.9, rounds=60):
    """A length whose draft is always right, at costs (0.1, 1 + 0.05 n)."""
    length = Adaptive().start()
    for _ in range(rounds):
        drafted = 0
        for position in range(length.budget(range(rows))):
            if position and not length.run_again(position):
                break
            if not length.go_on(position, distributions([confidence] * rows)).any():
                break
            drafted += 1
        length.observe(Round.counted([(drafted, drafted, drafted + 1)] * rows, 0.1 * (drafted + 1), 1 + 0.05 * drafted))
    return length


def test_it_decides_from_distributions_before_a_token_is_drawn():
    """Two rounds whose distributions and history agree go the same way, whatever was drawn: only distributions and
    committed counts come in. A low distribution in one row does not stop the others."""
    length = learned(rows=3)
    length.known.acceptance.learn([((*[0.9] * position, 0.07), position, position + 1) for position in range(3)] * 8)
    assert length.budget(range(3)) == 16
    assert length.go_on(0, distributions([0.9, 0.9, 0.9])).tolist() == [True] * 3
    assert length.run_again(1)
    assert length.go_on(1, distributions([0.9, 0.07, 0.9])).tolist() in ([True] * 3, [True, False, True])
    stopped = length.go_on(2, distributions([0.9, 0.07, 0.9]))
    assert stopped.tolist() == [True, False, True]  # a row that has lost its draft stops by itself


def test_rows_that_ended_are_left_out():
    length = learned(rows=3)
    length.budget([1])
    assert length.go_on(0, distributions([0.9, 0.9, 0.9])).tolist() == [False, True, False]
    three = Round.counted([(0, 0, 0), (1, 1, 2), (0, 0, 0)], 0.1, 1.05)
    length.observe(dataclasses.replace(three, unfinished=[1]))


def test_a_good_draft_goes_deep_and_a_plain_pass_is_measured_again():
    length = learned(rounds=300)
    assert max(length.known.verify.samples) == 17
    assert length.known.rounds - length.known.plain_at <= 256


def test_rounds_of_other_drafters_wear_a_pause_off():
    length = simulate(Adaptive(), PAIRS[1], [text(HOPELESS)], TOKENS).length
    length.known.paused = 6.0
    another = Round.counted([(4, 3, 4)], 0.1, 1.2)
    budgets = []
    for _ in range(3):
        budgets.append(length.budget(ONE))
        length.observe_other(another)
    assert budgets[:2] == [0, 0]  # the pause is counted in tokens, of which these rounds have four
    assert budgets[2] > 0


def test_a_list_within_a_list_notes_the_rounds_of_others():
    members = [Member(simulate(Adaptive(), PAIRS[1], [text(HOPELESS)], TOKENS).length) for _ in range(2)]
    for member in members:
        member.length.known.paused = 6.0
    CombinedLength(members).observe_other(Round.counted([(4, 3, 4)], 0.1, 1.2))
    assert [member.length.known.paused for member in members] == [2.0, 2.0]


def test_a_probe_that_has_much_to_read_comes_later():
    """A draft that reads 100 missed tokens in its probe takes longer than the draft alone, so pauses are longer."""

    def pause(seconds):
        length = simulate(Adaptive(), PAIRS[1], [text(HOPELESS)], TOKENS).length
        length.known.paused = 0.0
        length.known.pause = 300.0
        length.missed = 100.0
        assert length.budget(ONE) > 0
        assert length.go_on(0, distributions([0.2])).all()
        length.observe(Round.counted([(1, 0, 1)], seconds, 1.02))
        return length.known.paused

    assert pause(0.3) == pytest.approx(32, rel=0.1)  # 1% of the time
    assert pause(1.3) == pytest.approx(132, rel=0.1)


CHEAP = Costs(((1, 1.0), (17, 1.01)), 0.0)  # whatever is drafted pays


def test_positions_behind_a_rejection_are_not_counted():
    length = Adaptive(costs=CHEAP).start()
    length.known.asks = True
    length.budget(ONE)
    assert length.go_on(0, distributions([0.85])).all()
    for position in (1, 2):
        assert length.run_again(position)
        assert length.go_on(position, distributions([0.85])).all()
    rates = length.known.acceptance.rates
    length.observe(Round.counted([(3, 1, 2)], 0.3, 1.0))
    assert rates.seen == 2  # one accepted, one rejected, the third unknown
    length.observe(Round.counted([(3, 1, 1)], 0.3, 1.0))  # the row ended in its draft: nothing was rejected
    assert rates.seen == pytest.approx(2.98)


def test_a_tree_rejects_nothing_behind_its_last_level():
    length = Adaptive(costs=CHEAP).start()
    length.known.asks = True
    length.budget(ONE)
    assert length.go_on(0, distributions([0.85])).all()
    length.run_again(1)
    length.survival = dict.fromkeys(length.survival, 0.0)
    assert not length.go_on(1, distributions([0.3])).any()  # no second level
    tree = dataclasses.replace(Round.counted([(5, 1, 2)], 0.3, 1.0), depths=[1])
    length.observe(tree)  # of five nodes one was accepted, as many as a path has
    acceptance = length.known.acceptance
    assert acceptance.rates.seen == 1
    assert acceptance.accept(0.85, 0) > 0.85


def test_a_curve_fills_in_and_forgets_first_passes():
    curve = Timings(8, 0.02, one_apart=True)
    curve.add(1, 9.0)  # the first pass of a shape
    assert not curve.seconds
    curve.add(1, 1.0)
    assert curve.at(1) == 1.0
    assert curve.at(3) == pytest.approx(1.04)
    for seconds in (50.0, 1.4, 1.4):
        curve.add(5, seconds)
    assert [curve.at(n) for n in (1, 3, 5)] == pytest.approx([1.0, 1.2, 1.4])
    assert curve.at(8) == pytest.approx(1.4 * 1.06)  # what the first column lacks says nothing of the sixth
    assert curve.at(100) == curve.at(8)
    for seconds in (30.0, 20.0):  # twice an outlier: a wider pass was faster
        curve.add(3, seconds)
    assert curve.at(3) == pytest.approx(1.4)


def test_a_single_wide_pass_raises_a_guess_that_is_too_low():
    """Where columns are dear, drafts of many lengths would be lost before two of them had been as long."""
    curve = Timings(8, 0.02, one_apart=True)
    for seconds in (1.0, 1.0):
        curve.add(1, seconds)
    curve.add(5, 3.0)
    assert curve.at(5) == pytest.approx(2.0)  # half of it is believed: it may have been slow for being the first
    curve.add(3, 1.2)  # the cheapest counts
    assert curve.at(3) == pytest.approx(1.1)
    curve.add(4, 1.01)
    assert curve.at(3) == pytest.approx(1.04)  # never below the guess
    curve.add(5, 1.8)
    assert [curve.at(n) for n in (3, 5)] == pytest.approx([1.4, 1.8])  # and now that it was seen twice, it holds
    dear, source = Pair(0.05, 0.6), SOURCES["one regime"]
    runs = [simulate(Adaptive(), dear, [text(source, 96, seed)], 96, seed).speedup for seed in range(20)]
    assert sum(runs) / len(runs) >= 0.98


def test_one_column_says_little_of_several():
    """It may be run by other kernels: a step from one to two is no slope."""
    curve = Timings(8, 0.02, one_apart=True)
    for count, seconds in ((1, 4.7), (1, 4.7), (2, 7.7), (2, 7.7)):
        curve.add(count, seconds)
    assert [curve.at(n) for n in (1, 2, 7)] == pytest.approx([4.7, 7.7, 7.7 * 1.1])
    for seconds in (10.2, 10.2):
        curve.add(4, seconds)
    assert [curve.at(n) for n in (3, 6)] == pytest.approx([8.95, 12.7])  # among several it is one


def test_in_a_batch_a_second_column_predicts_the_others():
    """One column of eight rows is a product over eight already. A chain that seems endless would be drafted to its limit."""
    asked = {}
    for rows in (1, 8):
        length, chain = Adaptive().start(), (1, 1, 2)
        seconds = iter((1.6, 1.0, 1.6, 1.0, 1.6))  # the second and the fourth round measure a single column
        for passed in seconds:
            drafted = length.budget(range(rows)) > 0
            length.observe(Round.counted([chain if drafted else (0, 0, 1)] * rows, 0.0, passed, drafted))
        length.known.acceptance.by_position[0].total *= 0.55
        asked[rows] = length.budget(range(rows))
    assert asked[1] > 4 and asked[8] == 1


@pytest.mark.parametrize("source", [*SOURCES.values(), HOPELESS], ids=[*SOURCES, "hopeless"])
def test_a_batch_on_a_busy_processor_hardly_loses(source):
    """Where a second column of eight rows costs nearly half a pass: what a first call spends to know it, and later ones."""
    busy, first, later = Pair(0.3, 0.05, row=0.1), [], []
    for seed in range(8):
        runs, earlier = [], None
        for call in range(3):
            texts = [text(source, 48, 100 * seed + 10 * call + row) for row in range(8)]
            runs.append(simulate(Adaptive(), busy, texts, 48, seed, earlier, asks=False, found=0.5))
            earlier = runs[-1].length
        first.append(runs[0].speedup)
        later += [run.speedup for run in runs[1:]]
    assert sum(first) / len(first) >= 0.945
    assert sum(later) / len(later) >= 0.98


def test_a_call_waits_for_its_slowest_row():
    """Seven rows that gain do not pay for the eighth, unless other texts take their places."""
    sure = Source(stretches=(1e9, 1.0), confidences=((9.0, 1.0), (2.0, 4.0)))
    busy, runs, earlier = Pair(0.3, 0.05, row=0.1), [], None
    for call in range(8):
        texts = [text(HOPELESS if row == 3 else sure, 48, 10 * call + row) for row in range(8)]
        runs.append(simulate(Adaptive(), busy, texts, 48, call, earlier, asks=False))
        earlier = runs[-1].length
    assert sum(run.plain for run in runs) / sum(run.seconds for run in runs) >= 0.95
    earned = {}
    for renewed in (False, True):
        length = Adaptive(costs=dataclasses.replace(CHEAP, draft=0.0)).start()
        if renewed:
            length.renew(0)
        for _ in range(8):
            drafted = min(2, length.budget((0, 1)))
            rows = [(2, 2, 3), (2, 0, 1)] if drafted else [(0, 0, 1)] * 2
            length.observe(Round.counted(rows, 0.0, 1.0, drafted > 0))
        earned[renewed] = length.known.credit
    assert earned[True] > earned[False] + 0.5  # of a mean of two tokens a round beside one


def test_a_count_that_seemed_dear_is_forgotten():
    """Nothing is drafted to that length any more, so that nothing new would be heard of it."""
    curve = Timings(8, 0.02, one_apart=True)
    for count, seconds in ((1, 1.0), (1, 1.0), (2, 1.1), (2, 1.1), (5, 9.0), (5, 9.0)):
        curve.add(count, seconds)
    later = copy.deepcopy(curve)
    for _ in range(101):
        assert later.at(5) == 9.0
        later.add(2, 1.1)
    assert later.at(5) == pytest.approx(1.1 * 1.06)
    assert later.at(1) == 1.0  # the plain pass, by which all else is weighed, stays
    for seconds in (1.5, 1.5):  # and of the count it is the new that holds
        later.add(5, seconds)
    assert later.at(5) == 1.5
    assert curve.at(5) == 9.0


def judged(acceptance, confidence, position, right, rounds):
    """So many rounds whose drafts were judged at this position only, as far as the rates there can tell."""
    for _ in range(rounds):
        acceptance.learn([((confidence,) * (position + 1), position + right, position + 1)])


def test_acceptance_leans_on_what_was_seen():
    acceptance = Acceptance()
    assert acceptance.accept(0.85, 0) == pytest.approx(0.85)  # taken at its word
    judged(acceptance, 0.85, 0, False, 50)
    assert acceptance.accept(0.85, 0) < 0.1
    assert acceptance.accept(0.85, 9) < 0.3  # other positions learn from it
    assert acceptance.accept(0.15, 0) == pytest.approx(0.15)
    for _ in range(1000):
        acceptance.learn([])
    assert acceptance.accept(0.85, 0) > 0.7  # and it is forgotten
    for _ in range(50):
        acceptance.learn([((), 1, 1)])
    assert acceptance.chain(3) == pytest.approx([0.96] * 3, abs=0.01)  # each position leans on the one before it


def test_a_draft_that_is_right_where_it_is_unsure():
    """A quantized copy is accepted whatever its confidence. The tokens of one confidence show it, and it counts for all."""
    acceptance = Acceptance()
    judged(acceptance, 0.65, 0, True, 40)
    assert acceptance.accept(0.35, 1) > 0.85
    assert acceptance.following(0.35) > 0.85
    judged(acceptance, 0.65, 0, False, 40)  # as many rejections as the confidences predicted, and more
    assert acceptance.accept(0.35, 3) == pytest.approx(0.35)


def test_a_copy_learns_by_itself():
    first = Acceptance()
    judged(first, 0.65, 0, True, 5)
    before = first.accept(0.65, 0), first.chain(2), first.following(0.65)
    later = copy.deepcopy(first)
    later.see_following(0.65, 0.1)
    later.learn([((0.65,), 0, 1), ((), 0, 1)])
    assert (first.accept(0.65, 0), first.chain(2), first.following(0.65)) == before
    assert later.accept(0.65, 0) < before[0]


def test_on_models():
    """The answer is plain decoding's, the report says what drafting brought, and the next call starts from there."""
    target = build(ARCHITECTURES[0])
    assert AssistedModelForCausalLM.from_models(target, draft="suffix").draft_length == Adaptive()
    cheap = Adaptive(draft_cost=0.1)  # by its weights, it would hardly be worth the reading of a prompt
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=cheap)
    call = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    shares = []
    for rows in (1, 3):
        ids = random_ids(target, rows, 12, seed=rows)
        plain = target.generate(ids, **call)
        for _ in range(2):
            assert model.generate(ids, **call).tolist() == plain.tolist()
            shares.append(model.report.assisted_share)
    assert model.report.predicted_speedup is not None
    assert 0 < max(shares) <= 1  # a later call may know that it is not worthwhile
    assert model.length.costs.draft > 0
    assert model.length.known.rounds > 60 / 17 * 2  # those of both calls with three rows
    assert len(model.measured.lengths) == 2


def answered(length, tokens, seconds=1.0):
    """The rounds of a call without drafts."""
    for _ in range(tokens):
        length.budget(ONE)
        length.observe(Round.counted([(0, 0, 1)], 0.0, seconds, asked=False))
    length.end()
    return length


@pytest.mark.parametrize(
    ("share", "prompt", "room", "earlier", "reads"),
    [
        (0.1, 100.0, 16, (), False),  # ten forward passes of reading, in a sixteen-token answer
        (0.1, 100.0, 256, (), True),
        (0.1, 100.0, 256, (12, 9, 11), False),  # no answer was that long
        (0.1, 100.0, 16, (16, 16), False),
        (0.1, 100.0, 256, (16, 16), True),  # they had to end
        (0.1, 2.0, 16, (), True),
        (None, 100.0, 16, (), True),  # a lookup has nothing to read
    ],
)
def test_a_draft_reads_the_prompt_only_for_an_answer_of_enough_tokens(share, prompt, room, earlier, reads):
    length, policy = None, Adaptive(draft_cost=share)
    for tokens in earlier:
        length = policy.start(length)
        length.drafter_reads_prompt()
        length.prompt_read(16 if tokens == 16 else 256, 1000.0)
        answered(length, tokens)
    length = policy.start(length)
    if share is not None:
        length.drafter_reads_prompt()
    length.prompt_read(room, prompt)
    budgets = []
    for _ in range(3):  # two rounds without a draft tell what there is to save
        budgets.append(length.budget(ONE))
        if not budgets[-1]:
            length.observe(Round.counted([(0, 0, 1)], 0.0, 1.0, asked=False))
    assert (budgets[-1] > 0) is reads


def test_a_head_of_a_hybrid_reads_the_prompt_only_for_long_answers(monkeypatch):
    """In seconds that count columns: by its weights, the head reads the prompt in the time of five forward passes."""
    clock, read = SimpleNamespace(seconds=0.0), []
    monkeypatch.setattr("assisted.core.host.time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    def costs(owner, name, cost):
        run = getattr(owner, name)

        def counted(*args, **kwargs):
            clock.seconds += cost(*args)
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def reading(runner, tokens, states, counts):
        read.append(sum(counts))
        return 0.1 + 0.05 * sum(counts)

    costs(CachedModel, "__call__", lambda runner, ids, *_: 0.98 + 0.02 * ids.shape[1])
    costs(generation, "read_prompt", lambda call, lent: 0.4 * call.inputs.ids.shape[1])
    costs(HeadRunner, "read", reading)
    model = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft="mtp")
    ids = next(held_out_prompts(model.tokenizer)).ids[:, :150]
    call = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    for tokens, reads in ((8, False), (8, False), (96, True)):
        read.clear()
        plain = model.generate(ids, max_new_tokens=tokens, assisted=False, **call)
        assert model.generate(ids, max_new_tokens=tokens, **call).tolist() == plain.tolist()
        assert (sum(read) >= 149) is reads
        assert (model.report.drafted > 0) is reads
        passes = model.report.target_passes
        assert passes < 80 if reads else passes == tokens - 1


def test_saved_with_the_pair(tmp_path):
    target = build(ARCHITECTURES[0])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    model.draft_length = Adaptive(maximum=5, costs=Costs(((1, 0.01), (4, 0.02)), 0.001))
    model.save_pretrained(tmp_path)
    assert AssistedModelForCausalLM.from_pretrained(tmp_path).draft_length == model.draft_length


def test_the_simulation_is_fair():
    """An oracle's fixed length is worth what the simulation says of that fixed length."""
    pair = Pair(0.3, 0.02)
    run = simulate(Fixed(3), pair, [text(Source())], TOKENS)
    assert run.speedup == pytest.approx(simulation._rule(pair, text(Source()), TOKENS, 3, 0.0, 1), rel=0.01)
    assert torch.allclose(distributions([0.3, 0.999]).sum(-1), torch.ones(2))


@pytest.fixture(scope="module")
def written_by_the_shipped_pair():
    """Greedy texts of the shipped target on held-out code: the shipped draft's confidence in every token, and whether it
    agrees. As many tokens behind the end as a draft may look at."""
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")
    texts = []
    for prompt in islice(held_out_prompts(model.tokenizer), 6):
        ids = model.generate(
            prompt.ids, max_new_tokens=WRITTEN + 64, do_sample=False, eos_token_id=None, pad_token_id=1
        )
        with torch.no_grad():
            confidence, choice = model.drafter.model(ids).logits.softmax(-1).max(-1)
        new = slice(prompt.ids.shape[1], None)
        agrees = choice[0, :-1] == ids[0, 1:]
        texts.append(list(zip(confidence[0, :-1].tolist(), agrees.tolist(), strict=True))[new])
    return texts


@pytest.mark.parametrize("pair", [Pair(0.12, 0.02, 0.05), Pair(0.15, 0.05, 0.3), Pair(0.4, 0.05)], ids=str)
def test_on_the_shipped_pair_it_is_as_good_as_the_best_fixed_length(written_by_the_shipped_pair, pair):
    """In simulated seconds, over texts that repeat themselves and texts that do not; the best length is found in hindsight."""

    def speedup(policy):
        seconds, earlier = 0.0, None
        for seed, text in enumerate(2 * written_by_the_shipped_pair):
            run = simulate(policy, pair, [text], WRITTEN, seed, earlier)
            earlier = run.length
            seconds += run.seconds if seed >= len(written_by_the_shipped_pair) else 0.0
        return WRITTEN * len(written_by_the_shipped_pair) / seconds

    best = max(speedup(Fixed(tokens)) for tokens in (1, 2, 3, 4, 6, 8, 12, 16))
    assert speedup(Adaptive()) > 0.97 * best
