"""The checks of an audit, and its result. Each compares a subject with exact numbers of the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .subjects import NotOffered, Sampled, Subject, decoded

SEEDS = "seeds"
PASSED, FAILED, NOT_TESTED = "passed", "failed", "not tested"
_RANKS = (1, 2, 5, 20)  # ends of the classes in which sampled tokens are counted: the top-1 token, the second, ...
_RARE = 1e-4  # the p-value below which a check of a distribution fails
_LEAST = 5.0  # expected tokens in a class; smaller ones join the class before
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "likes": {"enum": ["cats", "dogs"]}},
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
_REQUEST = "Invent a person: name, age, and whether they like cats or dogs."


@dataclass(frozen=True)
class Settings:
    """How much is tested.

    Args:
        new_tokens: of every text.
        samples: sampled texts for each prompt.
        temperature: of samples.
        gap: how far the logit of a differing greedy token may be below the reference's largest; None follows the dtype.
        logprob: how far log probabilities may be from the reference's; None follows the dtype.
        json_requests: requests with a JSON schema.
    """

    new_tokens: int = 48
    samples: int = 8
    temperature: float = 1.0
    gap: float | None = None
    logprob: float | None = None
    json_requests: int = 8


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: its name.
        verdict: "passed", "failed" or "not tested".
        told: one sentence.
        figures: what was counted.
    """

    check: str
    verdict: str
    told: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Args:
        subject, reference: their names.
        prompts: how many there were.
        settings: how much was tested.
        findings: of the checks, in order.
    """

    subject: str
    reference: str
    prompts: int
    settings: Settings
    findings: tuple[Finding, ...]

    @property
    def is_lossless(self) -> bool:
        """Whether no check failed, apart from seeds: an engine that draws other numbers each time may still be exact."""
        return all(finding.verdict != FAILED or finding.check == SEEDS for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"is_lossless": self.is_lossless}


def audit(
    subject: Subject,
    reference: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    settings: Settings | None = None,
    name: str = "reference",
    progress: Callable[[str, float], None] = lambda step, share: None,
) -> Audit:
    """Compare a subject with a model of transformers that holds the same weights and decodes without drafts.

    Args:
        subject: a `Model` or a `Server`.
        reference: a causal LM. Differences of rounding are judged by its dtype.
        tokenizer: of both.
        prompts: token ids. Short ones test more of the drafts, since exact probabilities are computed for every token.
        settings: how much is tested.
        name: of the reference, for the report.
        progress: called with the current check and the share of it that is done.

    Raises ValueError without prompts, ConnectionError if a server stops answering.
    """
    if not prompts:
        raise ValueError("prompts: there are none; give at least one")
    settings = settings or Settings()
    asked = _Checks(subject, reference, tokenizer, prompts, settings, progress)
    checks = {
        "greedy text": asked.greedy,
        "sampled tokens": asked.sampled,
        SEEDS: asked.seeds,
        "stop strings": asked.stops,
        "log probabilities": asked.logprobs,
        "JSON": asked.json,
    }
    findings = []
    for check, run in checks.items():
        asked.check = check
        try:
            findings.append(Finding(check, *run()))
        except NotOffered as reason:
            findings.append(Finding(check, NOT_TESTED, f"{reason}."))
    return Audit(subject.name, name, len(prompts), settings, tuple(findings))


_Result = tuple[str, str, dict[str, Any]]


@dataclass
class _Checks:
    subject: Subject
    reference: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    settings: Settings
    progress: Callable[[str, float], None]
    check: str = ""  # that runs
    texts: list[Sampled] = field(default_factory=list)  # greedy ones of the subject

    def __post_init__(self) -> None:
        usual = 1e-3 if self.reference.dtype in (torch.float32, torch.float64) else 0.25
        self.gap, self.logprob = (usual if x is None else x for x in (self.settings.gap, self.settings.logprob))

    def greedy(self) -> _Result:
        """Greedy texts against the reference's. The first difference decides: is it a near-tie of the reference?"""
        equal = 0
        ties: list[dict[str, Any]] = []
        wrong: list[dict[str, Any]] = []
        for number, prompt in self._each():
            made = self.subject.write(prompt, self.settings.new_tokens)
            self.texts.append(made)
            ids = torch.tensor([prompt], device=self.reference.device)
            call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self.settings.new_tokens}
            expected = self.reference.generate(ids, do_sample=False, **call)[0, len(prompt) :].tolist()
            at = next((i for i, (a, b) in enumerate(zip(made.tokens, expected, strict=False)) if a != b), None)
            if at is None:  # one may have been cut at an end token that the other shows
                equal += 1
                continue
            logits = self._logits(prompt, expected[:at])[-1]
            gap = float(logits.max() - logits[made.tokens[at]])
            where = {"prompt": number, "position": at, "gap": gap, "wrote": self._shown(made.tokens[at])}
            (ties if gap <= self.gap else wrong).append(where | {"expected": self._shown(expected[at])})
        figures = {"texts": len(self.prompts), "equal": equal, "near_ties": ties, "wrong": wrong, "gap": self.gap}
        if wrong:
            first = wrong[0]
            told = (
                f"{len(wrong)} of {len(self.prompts)} texts leave the reference where it is sure. The first, at token "
            )
            told += f"{first['position']}: {first['wrote']!r} instead of {first['expected']!r}, {first['gap']:.3g} below it."
            return FAILED, told, figures
        told = f"{equal} of {len(self.prompts)} texts equal the reference's"
        return PASSED, f"{told}, the others first differ at near-ties." if ties else f"{told}.", figures

    def sampled(self) -> _Result:
        """Chi-square of the ranks of sampled tokens. Given their prefixes, the expected counts and covariances are exact."""
        ends = torch.tensor(_RANKS)
        observed = expected = torch.zeros(len(_RANKS) + 1, dtype=torch.float64)
        covariance = torch.zeros(len(_RANKS) + 1, len(_RANKS) + 1, dtype=torch.float64)
        tokens = 0
        for number, prompt in self._each():
            for sample in range(self.settings.samples):
                seed = 1000 * number + sample
                made = self.subject.write(prompt, self.settings.new_tokens, self.settings.temperature, seed=seed)
                if not made.named:
                    raise NotOffered("its answers do not name their tokens")
                if not made.tokens:
                    continue
                logits = self._logits(prompt, made.tokens[:-1]) / self.settings.temperature
                p, order = logits.double().softmax(-1).sort(-1, descending=True)
                drawn = (order == torch.tensor(made.tokens)[:, None]).int().argmax(-1)
                classes = torch.bucketize(torch.arange(p.shape[-1]), ends, right=True)
                share = torch.zeros(len(p), len(_RANKS) + 1, dtype=torch.float64).index_add_(1, classes, p)
                observed = observed + torch.bincount(classes[drawn], minlength=len(_RANKS) + 1)
                expected = expected + share.sum(0)
                covariance += torch.diag(share.sum(0)) - share.t() @ share
                tokens += len(p)
        if not tokens:
            raise NotOffered("no token was sampled")
        joined = _joined(expected)
        difference = joined @ (observed - expected)
        # one class less: the differences add up to zero
        within = (joined @ covariance @ joined.t())[:-1, :-1]
        freedom = len(within)
        if freedom == 0:
            raise NotOffered(
                "nearly every sampled token is the top-1 token; give other prompts or a higher temperature"
            )
        statistic = float(difference[:-1] @ torch.linalg.pinv(within) @ difference[:-1])
        halves = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
        value = float(torch.special.gammaincc(*halves))
        counts = {"tokens": tokens, "classes": ["1", "2", "3-5", "6-20", "after 20"]}
        shares = {"observed": (observed / tokens).tolist(), "expected": (expected / tokens).tolist()}
        figures = {**counts, **shares, "chi_square": statistic, "degrees": freedom, "p_value": value}
        told = f"{tokens} sampled tokens, chi-square {statistic:.1f} with {freedom} degrees (p = {value:.2g}): the reference's "
        told += f"top-1 token is {observed[0] / tokens:.1%} of them, expected {expected[0] / tokens:.1%}."
        return (FAILED if value < _RARE else PASSED), told, figures

    def seeds(self) -> _Result:
        """The same seed twice."""
        call = (self.settings.new_tokens, self.settings.temperature)
        pairs = [[self.subject.write(prompt, *call, seed=7).tokens for _ in range(2)] for _, prompt in self._each()]
        equal = sum(one == other for one, other in pairs)
        told = f"{equal} of {len(pairs)} texts are the same with the same seed."
        return (PASSED if equal == len(pairs) else FAILED), told, {"texts": len(pairs), "equal": equal}

    def stops(self) -> _Result:
        """A stop string out of the middle of each greedy text: the text up to there, and nothing after it."""
        tested, wrong = 0, []
        if len(self.texts) < len(self.prompts):
            raise NotOffered("there are no greedy texts to stop in")
        for number, prompt in self._each():
            whole = self.texts[number]
            middle = whole.tokens[len(whole.tokens) // 2 :][:2]
            stop = decoded(self.tokenizer, middle)
            if not stop.strip() or "\ufffd" in stop or stop not in whole.text:
                continue
            tested += 1
            made = self.subject.write(prompt, self.settings.new_tokens, stop=stop).text
            upto = whole.text[: whole.text.index(stop)]
            # an engine may include the stop string, and the rest of the token that ends it
            growing = (decoded(self.tokenizer, whole.tokens[:count]) for count in range(1, len(whole.tokens) + 1))
            first = next(text for text in growing if stop in text)
            if made not in (upto, upto + stop, first):
                wrong.append({"prompt": number, "stop": stop, "ends": made[-40:]})
        if not tested:
            raise NotOffered("no greedy text has a string in its middle to stop at")
        told = f"{tested - len(wrong)} of {tested} texts end at their stop string."
        if wrong:
            told = f"{len(wrong)} of {tested} texts do not end at their stop string, the first at {wrong[0]['ends']!r}."
        return (FAILED if wrong else PASSED), told, {"texts": tested, "wrong": wrong}

    def logprobs(self) -> _Result:
        """Log probabilities of greedy tokens against the reference's after the same prefix.

        A 0 where the reference is not sure is a placeholder: llama.cpp computes none for the tokens of a round with drafts.
        """
        most, tokens, zeros = 0.0, 0, 0
        for _, prompt in self._each():
            made = self.subject.write(prompt, self.settings.new_tokens, logprobs=True)
            if not made.tokens or made.logprobs is None:
                continue
            of_reference = self._logits(prompt, made.tokens[:-1]).float().log_softmax(-1)
            for row, token, found in zip(of_reference, made.tokens, made.logprobs, strict=False):
                difference, tokens = abs(float(row[token]) - found), tokens + 1
                if found == 0.0 and difference > self.logprob:
                    zeros += 1
                else:
                    most = max(most, difference)
        if not tokens:
            raise NotOffered("no token came with a log probability")
        allowed = f"(allowed: {self.logprob:g})"
        told = f"{tokens - zeros} log probabilities differ by at most {most:.2g} from the reference's {allowed}"
        if zeros:
            told += (
                f"; {zeros} others are exactly 0, which says that their tokens were certain, and they were not: the engine "
                "gives no log probabilities for some tokens, such as those of rounds with drafts"
            )
        figures = {"tokens": tokens, "most": most, "zeros": zeros}
        return (FAILED if zeros or most > self.logprob else PASSED), f"{told}.", figures

    def json(self) -> _Result:
        """Answers in a prescribed form."""
        answers = [self.subject.json_object(_REQUEST, _SCHEMA, seed) for seed in range(self.settings.json_requests)]
        ended = [answer for answer in answers if answer is not None]
        cut = len(answers) - len(ended)
        if not ended:
            raise NotOffered("every answer reached its limit of tokens before it ended")
        wrong = [answer for answer in ended if not _is_valid(answer)]
        told = f"{len(ended) - len(wrong)} of {len(ended)} answers follow their JSON schema"
        told += f"; {cut} more reached their limit of tokens before they ended." if cut else "."
        return (FAILED if wrong else PASSED), told, {"answers": len(ended), "wrong": wrong, "cut": cut}

    def _each(self) -> Iterator[tuple[int, list[int]]]:
        for number, prompt in enumerate(self.prompts):
            self.progress(self.check, number / len(self.prompts))
            yield number, prompt

    @torch.no_grad()
    def _logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """The reference's logits after the prompt and after each of these tokens, [1 + tokens, V] on the host."""
        ids = torch.tensor([prompt + tokens], device=self.reference.device)
        found: torch.Tensor = self.reference(input_ids=ids).logits[0, len(prompt) - 1 :]
        return found.cpu()

    def _shown(self, token: int) -> str:
        return decoded(self.tokenizer, [token]) or f"token {token}"


def _joined(expected: torch.Tensor) -> torch.Tensor:
    """Which classes count together, [groups, classes] of 0 and 1: those with few expected tokens join the class before."""
    groups: list[list[int]] = []
    for number, count in enumerate(expected.tolist()):
        if groups and count < _LEAST:
            groups[-1].append(number)
        else:
            groups.append([number])
    if len(groups) > 1 and sum(float(expected[number]) for number in groups[0]) < _LEAST:
        groups[:2] = [groups[0] + groups[1]]
    made = torch.zeros(len(groups), len(expected), dtype=torch.float64)
    for row, members in enumerate(groups):
        made[row, members] = 1
    return made


def _is_valid(answer: str) -> bool:
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and set(found) == {"name", "age", "likes"}
        and isinstance(found["name"], str)
        and type(found["age"]) is int
        and found["likes"] in ("cats", "dogs")
    )
