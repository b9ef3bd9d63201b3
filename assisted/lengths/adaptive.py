"""The default draft length: drafting continues while the next token is expected to gain more time than it costs. Renewal-reward
stopping with measured costs, a cost-aware form of SpecDec++ (2405.19715).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import fmean

import torch

from ..core.drafts import Round
from .base import Columns, Length
from .cost_model import COLUMN, ENOUGH, KEEP, KEEP_LOCAL, PRIOR, Costs, DecayedMean, Timings, best_size, best_speedup
from .rates import Acceptance

LONGEST = 16
"""Tokens of a chain. A longer one is worthwhile only where a draft costs next to nothing and is nearly always right."""
CAPTURED = (7, 15)
"""The same where each shape of a forward pass is captured, so that it has 8 or 16 columns; the second with one row, after
`ENOUGH` drafts."""
AT_ONCE = (2, 4, *CAPTURED)
"""Lengths of chains that are captured as one function: a few, because each capture takes time."""
DEEPEST = 64
"""Depth of a tree whose size the drafter chooses: a limit that is hardly ever reached."""
CREDIT = 6.0
"""Tokens that drafting may lose, counted from its best, before it pauses; in batches tokens per row times the root of the rows.
Less mistakes bad luck for a bad draft, more lets a hopeless one go on. A first call has earned nothing and starts with one
token."""
PROBE_SHARE = 0.01
"""Share of the time that is spent on probes while drafting is paused: what a hopeless draft costs in the long run."""
STRETCH = 150.0
"""Tokens for which a text may stay unpredictable. Where drafting was worthwhile before, probes are as frequent as they have to
be to notice the end of such a stretch."""
DRAFT = 0.15
"""Guess of a forward pass of the draft, in passes of the target, where `draft_cost` is not known."""
PAUSE = 4.0
"""Length of the first pause in tokens, times the root of the rows; it doubles with every probe that fails."""
ACCEPTANCE = 0.7
"""Guess of the acceptance rate, for whether a draft is worth the reading of the prompt."""
HOPELESS = 0.3
"""Accepted tokens of a draft below which it has to be worth the reading of a short prompt, too. A count, because times of short
calls vary."""
READ_SHARE = 0.01
"""Share of the time in which a draft may read prompts though that is not expected to be worthwhile."""
STALE = 256
"""Rounds with a draft after which a round without one measures the cost of a single token again."""
_WARM_UP = (2, 4)  # rounds of a first call without a draft, which measure that cost
_FARTHER = 2  # a batch reads at most so many times the positions that were timed; each of them counts for all rows
_SLOWEST = 0.25  # weight of a batch's slowest row, for which the call waits; rows that end sooner spare time, too
_LOST = 0.005  # a row stops once its whole draft is accepted with no more than this probability
_FORWARD = 0.5  # guess of each further one, as a share of the first, which also reads the committed tokens


@dataclass
class Known:
    """What one `generate` passes on to the next.

    Args:
        verify: seconds of a forward pass of the target by its positions.
        draft: seconds of a draft by its forward passes; of a drafter that proposes a block at once, by the tokens that it was
            asked for.
        draft_cost: of a forward pass of the draft in passes of the target, until it is measured.
        credit: tokens that drafting may still lose before it pauses, see `CREDIT`.
        pause: length of the next pause in tokens.
        paused: tokens left of the current pause.
        acceptance: how often drafted tokens are accepted.
        found: the same of a drafter that looks them up, where it has found any.
        asks: whether the drafter asks before every token; None before its first draft.
        nodes: drafted nodes, to the tokens that a block was asked for: 1 for chains.
        pace: recent seconds per committed token of a row, by the costs.
        accepted: tokens of a row's draft that were accepted, to drafts.
        reading: seconds in which the draft reads a prompt, to those of the target.
        answers: tokens of the answers, to those that ended before they had to.
        saved: share of the baseline's time that is saved once the draft has read the prompt.
        unread: tokens since it last read one.
        rounds, plain_at: number of rounds so far, and of the last one without a draft.
    """

    verify: Timings
    draft: Timings
    draft_cost: float = DRAFT
    credit: float = 1.0
    pause: float = PAUSE
    paused: float = 0.0
    acceptance: Acceptance = field(default_factory=Acceptance)
    found: Acceptance = field(default_factory=Acceptance)
    asks: bool | None = None
    nodes: DecayedMean = field(default_factory=DecayedMean)
    pace: DecayedMean = field(default_factory=DecayedMean)
    accepted: DecayedMean = field(default_factory=DecayedMean)
    reading: DecayedMean = field(default_factory=DecayedMean)
    answers: DecayedMean = field(default_factory=DecayedMean)
    saved: DecayedMean = field(default_factory=DecayedMean)
    unread: int = 0
    rounds: int = 0
    plain_at: int = 0


@dataclass(frozen=True)
class Adaptive:
    """Draft while it is worthwhile by measured costs and acceptance rates. Drafting is disabled whenever it does not pay off.

    Args:
        maximum: the most tokens of a round (of a tree: its depth), at least 1. A higher one helps only where the draft costs
            next to nothing and is nearly always right. None (default) is 16, and 64 for a tree whose size the drafter chooses.
        margin: the speedup over the autoregressive baseline that drafting must reach to stay enabled, at least 1. A higher
            one disables it sooner.
        probe_every: the most tokens without drafting before it is tried again, at least 1. Where a trial is cheap, it comes
            sooner.
        costs: measured earlier (`model.length.costs`). Used until those of this machine are measured.
        draft_cost: a guess of a forward pass of the draft, in forward passes of the target over one token, used until both
            are measured. None takes the share of the draft's weights in the target's bytes.
        position_cost: a guess of what one more position adds to a forward pass of the target, in forward passes over one
            token, used until it is measured. None takes 0.02, on a CPU for each row of a batch, and more for a mixture of
            experts, which reads more experts.
    """

    maximum: int | None = None
    margin: float = 1.03
    probe_every: int = 300
    costs: Costs | None = None
    draft_cost: float | None = None
    position_cost: float | None = None

    def __post_init__(self) -> None:
        if self.maximum is not None and self.maximum < 1:
            raise ValueError(f"maximum: {self.maximum} is not possible; draft at least 1 token")
        if not self.margin >= 1:
            raise ValueError(f"margin: {self.margin} would draft at a loss; give a speedup of at least 1")
        if self.probe_every < 1:
            raise ValueError(f"probe_every: {self.probe_every} is not possible; give a number of tokens, at least 1")
        for name in ("draft_cost", "position_cost"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: {value} is no cost; give a share of a forward pass of the target")
        if isinstance(self.costs, dict):  # as config.json holds them
            object.__setattr__(self, "costs", Costs(**self.costs))

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Adaptive(self, earlier if isinstance(earlier, _Adaptive) else None)


class _Adaptive(Length):
    needs_q = reads_top = True

    def __init__(self, policy: Adaptive, earlier: _Adaptive | None):
        self.policy = policy
        column = COLUMN if policy.position_cost is None else policy.position_cost  # until it is measured
        costs, self.maximum = policy.costs, policy.maximum or LONGEST
        self.known: Known = (
            Known(
                Timings(self.maximum + 1, column, dict(costs.verify) if costs else None, one_apart=True),
                Timings(self.maximum, _FORWARD, {1: costs.draft, 2: 2 * costs.draft} if costs else None),
                DRAFT if policy.draft_cost is None else policy.draft_cost,
            )
            if earlier is None
            else pickle.loads(pickle.dumps(earlier.known))  # a copy, made in a sixth of deepcopy's time
        )
        self.local: dict[int, DecayedMean] = {}  # by row: seconds per token in its last rounds
        # by row: whether the target took none, some or all of the tokens of its last draft: 0, 1, 2
        self.last: dict[int, int] = {}
        self.reached: dict[int, int] = {}  # by row: tokens committed in this call
        self.slowest = _SLOWEST
        self.room: float | None = None  # tokens of an answer; None where rows get other texts
        self.prompt_seconds = 0.0  # of the target
        self.columns: Columns | None = None
        self.unfinished: Sequence[int] = ()  # rows of the current round
        self.drawn = False  # whether drafted tokens are sampled: the last argument of `go_on`
        self.sized_by_drafter = self.reads_prompt = self.is_short = False
        self.missed = float("inf")  # tokens committed since the draft's last round; at first the prompt
        self.proposing = torch.tensor(())  # [B] bool, the last result of `go_on`
        self._begin()

    def _begin(self) -> None:
        self.asked_for = 0  # tokens; 0 in a round without a draft
        self.forwards = 0  # forward passes of the draft
        self.asked = False  # `go_on` was called
        self.at_once = 0  # tokens that `ahead` has chosen
        self.probing = False
        self.prices: dict[int, float] = {}  # by row
        self.survival: dict[int, float] = {}  # by row: probability that all its drafted tokens are accepted
        self.confidences: dict[int, list[float]] = {}  # by row: of its drafted tokens
        self.depths: dict[int, int] = {}  # by row: positions at which `go_on` let it propose
        self.expected = 0.0  # accepted tokens of all rows

    @property
    def is_limit(self) -> bool:  # type: ignore[override]
        return self.policy.maximum is not None

    @property
    def costs(self) -> Costs | None:  # type: ignore[override]
        known = self.known
        if not known.verify.knots or not known.draft.knots:
            return None
        verify = known.verify.knots
        if self.columns is not None:
            verify = tuple((count, self._verify(count)) for count in range(1, max(known.verify.largest, 2) + 1))
        return Costs(verify, known.draft.each(by_count=known.asks is not False))

    @property
    def predicted_speedup(self) -> float | None:  # type: ignore[override]
        """Of its recent rounds, by the costs."""
        known = self.known
        return self._verify(1) / known.pace.mean() if known.draft.knots and known.pace.total else None

    def drafter_sizes_tree(self) -> None:
        self.sized_by_drafter, self.needs_q = True, False

    def drafter_reads_prompt(self) -> None:
        self.reads_prompt = True

    def renew(self, row: int) -> None:
        self.slowest = 0.0
        self.last.pop(row, None)

    def prompt_read(
        self, room: int, prompt_seconds: float = 0.0, columns: Columns | None = None, is_short: bool = False
    ) -> None:
        self.room, self.prompt_seconds, self.columns, self.is_short = room, prompt_seconds, columns, is_short

    def end(self) -> None:
        tokens = max(self.reached.values(), default=0)
        if self.room is not None and tokens:
            self.known.answers.add(tokens, tokens < self.room, KEEP_LOCAL)

    def budget(self, unfinished: Sequence[int]) -> int:
        known = self.known
        self.unfinished = unfinished
        if self.columns is not None and self.policy.maximum is None:
            self.maximum = CAPTURED[len(unfinished) == 1 and known.acceptance.rounds >= ENOUGH]
        self._begin()
        known.verify.one_apart = len(unfinished) == 1  # of several rows, one column each is several already
        known.rounds += 1
        if known.paused > 0:
            return 0
        if (known.rounds in _WARM_UP and 1 not in known.verify.typical) or known.rounds - known.plain_at > STALE:
            known.plain_at = known.rounds
            return 0
        if self.missed == float("inf") and not self._is_worth_reading():
            return 0
        self.forwards = 1
        self.probing = known.credit <= 0
        self.asked_for = self.maximum
        if self.sized_by_drafter and self.policy.maximum is None:
            self.asked_for = DEEPEST
        if not self.sized_by_drafter and not known.asks:
            self.asked_for = self._first_guess() if known.asks is None else self._best_block()
        return self.asked_for

    def ahead(self, budget: int) -> int | None:
        known = self.known
        if self.columns is None:
            return None
        if not known.verify.knots:
            self.at_once = min(self._first_guess(), budget)
            return self.at_once
        rows = [accumulate(known.acceptance.chain(budget, self.last.get(row)), mul) for row in self.unfinished]
        accepted = list(accumulate(map(fmean, zip(*rows, strict=True)), initial=0.0))
        draft, plain = known.draft, self._verify(1)
        price = min(plain, known.pace.mean(plain))

        def gain(tokens: int) -> float:
            drafting = draft.at(tokens) if draft.knots else tokens * known.draft_cost * plain
            return accepted[tokens] * price - self._verify(1 + tokens) - drafting

        # a length of its own at the end of a text would be captured for that end alone
        self.at_once = max([size for size in AT_ONCE if size <= budget] or [budget], key=gain)
        return self.at_once

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        acceptance = self.known.acceptance
        confidences = q.amax(-1).tolist()
        self.asked, self.drawn = True, drawn
        if position == 0:
            self._enter()
        before, gains = len(self.survival), {}
        for row, survival in self.survival.items():
            if survival > 0:
                confidence, before_it = confidences[row], self.confidences[row]
                accept = acceptance.accept(confidence, position, drawn)
                if before_it:
                    acceptance.see_following(before_it[-1], accept)
                before_it.append(confidence)
                gains[row] = survival * accept
        forced = position == 0 and self.probing  # a probe drafts at least one token
        # one more column costs the forward pass as much for one row as for all
        worth = forced or self._is_worthwhile(position, gains)
        self.survival = {row: gain for row, gain in gains.items() if worth and (forced or gain > _LOST)}
        self.expected += sum(self.survival.values())
        self.depths |= dict.fromkeys(self.survival, position + 1)
        if position == 0 or len(self.survival) < before:  # otherwise it has not changed
            self.proposing = torch.tensor([row in self.survival for row in range(len(confidences))])
        return self.proposing

    def run_again(self, position: int) -> bool:
        if self.asked:
            follow = self._following(self.survival)
        else:  # the drafter shows no distribution
            accept = self.known.acceptance.chain(position + 1)
            if position == 1:
                self._enter()
                self.survival = dict.fromkeys(self.survival, accept[0])
            follow = accept[position]
        gains = {row: survival * follow for row, survival in self.survival.items()}
        if not self._is_worthwhile(position, gains, drafting=True, follow=follow):
            return False
        if not self.asked:
            self.survival = gains
        self.forwards += 1
        return True

    def fit(self, found: Sequence[int]) -> int:
        verify, longest = self.known.verify, max(found)
        if len(found) == 1 or not verify.knots:
            return longest
        longest = min(longest, _FARTHER * verify.largest - 1)
        prices = [self._price(row) for row in self.unfinished]
        best, most, gain, reached = 0, 0.0, 0.0, 1.0
        for position, accept in enumerate(self.known.found.chain(longest)):
            reached *= accept
            here = sum(price for count, price in zip(found, prices, strict=True) if count > position)
            gain += reached * here / len(prices) - (self._verify(position + 2) - self._verify(position + 1))
            if gain > most or (position == 0 and self.probing):  # a probe drafts at least one token
                best, most = position + 1, gain
        return best

    def observe(self, round: Round) -> None:
        known, rows = self.known, round.unfinished
        committed, advance = round.mean(round.kept), self._advance(round)
        drafted = max(round.drafted[row] for row in rows)
        if self.forwards == 1 and not self.asked:
            self.forwards = max(1, self.at_once)
        known.verify.add(self._columns(1 + drafted), round.verify_seconds)
        if drafted == 0:
            known.plain_at = known.rounds
        # a positive budget may yield no draft because the text had no room for one
        drafting = self.asked_for > 0 and (drafted > 0 or self.asked or known.asks is False)
        # a few missed tokens, as between the rounds of another drafter, are part of a draft's usual cost; a lookup reads for
        # almost nothing
        behind = drafting and self.missed > self.maximum + 1 and known.asks is not False
        if drafting:
            if self.missed == float("inf") and self.prompt_seconds:
                reading = round.draft_seconds - (self._draft_cost() if known.draft.knots else 0.0)
                known.reading.add(max(0.0, reading), self.prompt_seconds, KEEP_LOCAL)
            self._learn(round, drafted, behind)
        taken = {row: (round.accepted[row], round.drafted[row]) for row in rows if round.drafted[row]}
        self.last = {row: 2 if accepted == count else min(accepted, 1) for row, (accepted, count) in taken.items()}
        self.missed = 0.0 if drafting else self.missed + committed
        if not known.verify.knots:
            return
        plain, cost = self._verify(1), self._verify(1 + drafted)
        if drafting:
            cost += self._draft_cost()
        for row in rows:
            if row not in self.local:  # it begins with the pace of as many rounds as it remembers
                self.local[row] = known.pace.faded((1 - KEEP) / (1 - KEEP_LOCAL))
            self.local[row].add(cost, round.kept[row], KEEP_LOCAL)
        known.pace.add(cost, committed, KEEP)
        known.unread += round.kept[rows[0]]
        if self.missed < float("inf"):
            known.saved.add(committed * plain - cost, committed * plain, KEEP)
            known.unread = 0
        if drafting and known.draft.knots:
            found_nothing = drafted == 0 and not self.asked  # a lookup, which costs next to nothing
            margin = 1.0 if found_nothing else self.policy.margin
            reading = max(0.0, round.draft_seconds - self._draft_cost()) if behind else 0.0
            earned = self._earned(committed, len(rows))
            earned += self.slowest * (advance - earned) if len(rows) > 1 else 0.0
            self._settle(earned - margin * cost / plain, (cost + reading) / plain - 1)
        elif not drafting:
            known.paused = max(0.0, known.paused - committed)

    def observe_other(self, round: Round) -> None:
        committed = round.mean(round.kept)
        self._advance(round)
        self.missed = committed if self.asked else self.missed + committed
        self.known.paused = max(0.0, self.known.paused - committed)

    def _advance(self, round: Round) -> int:
        """Tokens by which the row with the fewest came on."""
        before = min(self.reached.get(row, 0) for row in round.unfinished)
        for row in round.unfinished:
            self.reached[row] = self.reached.get(row, 0) + round.kept[row]
        return min(self.reached[row] for row in round.unfinished) - before

    def _columns(self, count: int) -> int:
        """The columns of a forward pass over so many."""
        return count if self.columns is None else self.columns(count, len(self.unfinished)) or count

    def _verify(self, count: int) -> float:
        """Seconds of a forward pass of the target. Only once something is known."""
        return self.known.verify.at(self._columns(count))

    def _is_worth_reading(self) -> bool:
        """Whether a draft is expected to save more time in the rest of the answer than it takes to read the prompt."""
        known = self.known
        reading = known.reading.mean(known.draft_cost, self.prompt_seconds) * self.prompt_seconds
        if not self.reads_prompt or not reading or self.room is None:
            return True
        if self.is_short and known.accepted.mean(1.0, PRIOR) > HOPELESS:
            return True
        if not known.verify.knots:  # a round without a draft tells what there is to save
            return False
        plain, guess = self._verify(1), 1 - 1 / best_speedup(ACCEPTANCE, known.draft_cost)
        saved = known.saved.mean(max(0.0, guess), 2 * PRIOR * plain) * plain
        left = min(self.room - max(self.reached.values(), default=0), known.answers.mean(self.room))
        return reading < max(saved * left, READ_SHARE * plain * known.unread)

    def _price(self, row: int) -> float:
        """Seconds that a token of this row is worth: its recent pace, at most a forward pass over one token.

        In a predictable stretch, the row would get its tokens cheaply in the next round as well.
        """
        known = self.known
        if not known.verify.knots:
            return 1.0
        plain = self._verify(1)
        return min(plain, self.local.get(row, known.pace).mean(plain))

    def _enter(self) -> None:
        """Start a draft."""
        self.survival = dict.fromkeys(self.unfinished, 1.0)
        self.prices = {row: self._price(row) for row in self.unfinished}
        self.confidences = {row: [] for row in self.unfinished}

    def _learn(self, round: Round, drafted: int, behind: bool) -> None:
        """Take in the seconds and the outcome of a draft. drafted: nodes of the longest row. behind: the draft first read
        tokens that it had missed."""
        known = self.known
        asks = self.asked or self.at_once > 0 or self.forwards > 1 or bool(known.asks)
        if known.asks is None and not asks:
            known.draft = Timings(self.maximum, 0.0)  # a block takes about as long for any number of tokens
        known.asks = asks
        if not behind:
            known.draft.add(self._draft_count(), round.draft_seconds)
        if drafted > self.asked_for:
            known.nodes.add(drafted / self.asked_for, keep=KEEP_LOCAL)
        known.accepted.add(round.mean(round.accepted), keep=KEEP)
        outcomes, found = [], []
        deepest = max(round.depths[row] for row in round.unfinished)
        for row in round.unfinished:
            accepted = round.accepted[row]
            # tokens after the first rejection were not judged; a row that ended in its draft rejected nothing
            if self.asked:
                depth = min(round.depths[row], self.depths.get(row, 0))
            else:  # a row for which nothing was found still costs the columns of the others
                depth = min(deepest, self.asked_for)
            rejected = accepted < depth and round.kept[row] > accepted
            outcomes.append((self.confidences.get(row, ()), accepted, accepted + rejected))
            rejected = accepted < round.depths[row] and round.kept[row] > accepted
            found.append(((), accepted, accepted + rejected))
        known.acceptance.learn(outcomes, self.drawn, [self.last.get(row) for row in round.unfinished])
        if not self.asked and len(round.unfinished) > 1:
            known.found.learn(found)

    def _draft_count(self) -> int:
        """The count that the cost of this round's draft depends on: its forward passes, or the tokens asked for at once."""
        return self.asked_for if self.known.asks is False else self.forwards

    def _draft_cost(self) -> float:
        """Seconds of this round's draft."""
        draft = self.known.draft
        return draft.at(self._draft_count()) if draft.knots else 0.0

    def _earned(self, committed: float, rows: int) -> float:
        """Tokens per row of a round with a draft; once it can be relied on, their expected number, which varies less."""
        trusted = self.asked and self.known.acceptance.rounds > ENOUGH
        return 1 + self.expected / rows if trusted else committed

    def _settle(self, gain: float, spent: float) -> None:
        """Add a draft's gain to the credit, and pause once the credit is used up.

        gain: tokens per row beyond those of the baseline in the same time. spent: cost of the round beyond that of a round
        without a draft, in rounds without one, with the reading of what the draft had missed.
        """
        known, certainty = self.known, len(self.unfinished) ** 0.5  # the mean of many rows owes less to luck
        known.credit = min(CREDIT, known.credit + certainty * gain)
        if known.credit > 0:
            if known.credit == CREDIT:
                known.pause = PAUSE
            return
        known.credit = 0.0
        longest = min(self.policy.probe_every, max(0.0, spent) / PROBE_SHARE)
        lately = (self.predicted_speedup or 1.0) - 1
        if lately > 0:  # where drafting was worthwhile, disabling it too long costs more than probing
            longest = min(longest, (2 * spent * STRETCH / lately) ** 0.5)
        known.paused = min(max(known.pause, certainty * PAUSE), longest)
        known.pause = max(PAUSE, min(2 * known.paused, longest))

    def _following(self, gains: dict[int, float]) -> float:
        """Expected acceptance rate of the tokens after these: mean over the rows, weighted by what they may still gain."""
        acceptance = self.known.acceptance
        total = following = 0.0
        for row, gain in gains.items():
            worth = gain * self.prices[row]
            total += worth
            following += worth * acceptance.following(self.confidences[row][-1], self.drawn)
        return following / total if total > 0 else 0.0

    def _is_worthwhile(
        self, position: int, gains: dict[int, float], drafting: bool = False, follow: float | None = None
    ) -> bool:
        """Whether a token at `position`, and perhaps more after it, is expected to save more time than it costs.

        gains: expected accepted tokens at `position`, by row. drafting: the draft's forward pass for the token has not been
        run yet. follow: acceptance rate of each token after it; None computes it where it is needed.
        """
        verify = self.known.verify
        if not verify.knots:
            return position < self._first_guess()
        if len(self.unfinished) > 1 and position + 2 > _FARTHER * verify.largest:
            return False
        draft = self.known.draft
        forward = draft.step if draft.knots else self.known.draft_cost * self._verify(1)
        # a forward pass advances all rows: time saved in one row counts for its share of the batch
        gain = sum(expected * self.prices[row] for row, expected in gains.items()) / len(self.prices)
        saved, cost, before = gain, forward if drafting else 0.0, self._verify(position + 1)
        for columns in range(position + 2, self.maximum + 2):
            if saved > cost + self._verify(columns) - before:
                return True
            follow = self._following(gains) if follow is None else follow
            gain *= follow
            saved += gain
            cost += forward
        return False

    def _first_guess(self) -> int:
        """Tokens to draft while the costs are unknown. For a batch, a second one may cost as much as the first."""
        return min(1 if self.known.rounds == 1 or len(self.unfinished) > 1 else 2, self.maximum)

    def _best_block(self) -> int:
        """Tokens to ask for, of a drafter that proposes a block at once."""
        known = self.known
        if not known.verify.knots:
            return self._first_guess()
        nodes = known.nodes.mean(1.0)
        chain = list(accumulate(known.acceptance.chain(self.maximum), mul))

        def seconds(tokens: int) -> float:
            draft = known.draft.at(tokens) if known.draft.knots else 0.0
            return self._verify(1 + round(nodes * tokens)) + draft

        return best_size(chain, seconds, range(1, self.maximum + 1))[0]
