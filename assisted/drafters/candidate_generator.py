"""Other people's drafters: any `CandidateGenerator`, the interface of transformers' own assisted generation, drafts here.

Nothing that it returns is trusted: what does not fit raises an error, which ends drafting for the call and changes no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..distribution import probabilities
from ..drafts import Draft, Round
from ..text import Text
from .base import Call, Drafter, Drafting, Spec, Target
from .registry import register


@register("candidates")
@dataclass(frozen=True)
class Candidates(Spec):
    """A candidate generator of transformers' interface drafts chains, for one sequence at a time.

    Args:
        generator: a `CandidateGenerator`; or a function that makes one for each call of `generate`, for generators that keep
            something of the text. It is given the prompt's ids, [1, P] int64.
        honest_logits: False (default) accepts a sampled token if the target draws the same one, which is exact for any
            generator. True uses the softmax of the returned logits as the distribution that each token was drawn from, as
            transformers does: more tokens are accepted. Set it only if the generator really draws from it: with argmax tokens
            beside these logits, the text would not follow the target's distribution.
    """

    title = "Candidate generator"
    acceptance = (0.0, 0.8)
    not_served = "a generator is Python code in this process"

    generator: CandidateGenerator | Callable[[torch.Tensor], CandidateGenerator] = field(metadata={"saved": False})
    honest_logits: bool = False

    @classmethod
    def takes(cls, draft: Any) -> bool:
        return isinstance(draft, CandidateGenerator)

    def load(self, target: Target, **kwargs: Any) -> CandidatesDrafter:
        """Nothing to load. Raises ValueError for a generator that reads more of the target than its tokens, TypeError for
        anything else."""
        if isinstance(self.generator, CandidateGenerator):
            _require_usable(self.generator)
        elif not callable(self.generator) or isinstance(self.generator, type):
            raise TypeError(
                f"generator: {self.generator!r} is neither a CandidateGenerator nor a function that makes one; write "
                "Candidates(lambda input_ids: MyGenerator(...))"
            )
        return CandidatesDrafter(self)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        raise ValueError(
            "draft: a candidate generator is an object in memory, which cannot be saved; save the target, and pass draft= when "
            "you load it"
        )


class CandidatesDrafter(Drafter):
    """Keeps nothing of its own. spec: the options."""

    def __init__(self, spec: Candidates):
        self.spec = spec

    def start(self, call: Call) -> CandidatesDrafting:
        """Raises ValueError for a batch."""
        if (rows := call.target.cache.rows) > 1:
            raise ValueError(
                f"draft: a candidate generator drafts for one sequence, and this call has {rows}; generate one at a time, or "
                "choose another draft"
            )
        return CandidatesDrafting(self.spec, call)


class CandidatesDrafting(Drafting):
    """One `generate` with a generator."""

    def __init__(self, spec: Candidates, call: Call):
        self.spec, self.call = spec, call
        self.generator: CandidateGenerator | None = None  # until it is asked
        self.text: Text | None = None
        self.proposed: Draft | None = None  # until it is verified

    def propose(self, text: Text, budget: int) -> Draft:
        self.text, ids = text, text.ids[:, : text.lengths[0]]
        if self.generator is None:
            self.generator = self._made(ids.clone())
        given, logits = self.generator.get_candidates(ids.clone())
        tokens = _continuation(given, ids)[:, :budget]
        if not tokens.shape[1]:
            self.proposed = None
            return Draft.empty(1, ids.device)
        q = None
        if self.call.distribution.do_sample and self.spec.honest_logits and logits is not None:
            q = _distributions(logits, tokens, self.call.vocab_size)
        draft = Draft(tokens, tokens.new_full((1,), tokens.shape[1]), q)
        self.proposed = draft.checked(1, self.call.vocab_size, ids.device)
        return draft

    def observe(self, round: Round) -> None:
        """Tell the generator what became of its draft."""
        if self.generator is not None and self.text is not None and round.draft.is_that_of(self.proposed):
            ids = self.text.ids[:, : self.text.lengths[0]].clone()
            self.generator.update_candidate_strategy(ids, round.logits.clone(), round.accepted[0])
        self.proposed = None

    def _made(self, ids: torch.Tensor) -> CandidateGenerator:
        """The generator of this call. ids: [1, P] int64."""
        given: Any = self.spec.generator
        made = given if isinstance(given, CandidateGenerator) else given(ids)
        if not isinstance(made, CandidateGenerator):
            raise TypeError(f"generator: the function returned {type(made).__name__}, not a CandidateGenerator")
        _require_usable(made)
        return made


def _require_usable(generator: CandidateGenerator) -> None:
    if getattr(generator, "requires_model_outputs", False):
        raise ValueError(
            f"draft: {type(generator).__name__} reads the target's hidden states (requires_model_outputs), which only "
            "transformers' own loop hands over; pass the drafting model itself as draft, if a method here reads it"
        )


def _continuation(given: Any, ids: torch.Tensor) -> torch.Tensor:
    """[1, n] int64, what `given` holds after the text `ids`, on its device. Raises ValueError for anything but a longer text
    with the same beginning."""
    count = ids.shape[1]
    if not isinstance(given, torch.Tensor) or given.ndim != 2 or len(given) != 1 or given.shape[1] < count:
        shown = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"candidate ids: expected [1, {count} or more], got {shown}")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"candidate ids: expected integers, got {given.dtype}")
    given = given.to(ids.device, torch.int64)
    if not torch.equal(given[:, :count], ids):
        raise ValueError("candidate ids: they do not begin with the text")
    return given[:, count:]


def _distributions(logits: Any, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[1, n, V] float32, the distributions that the tokens [1, n] are said to be drawn from. Raises ValueError for logits that
    they cannot be drawn from."""
    count = tokens.shape[1]
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else []
    if len(shape) != 3 or shape[0] != 1 or shape[1] < count or shape[2] != vocabulary:
        raise ValueError(f"candidate logits: expected [1, {count} or more, {vocabulary}], got {shape}")
    q = probabilities(logits[:, :count].to(tokens.device, torch.float32))
    if not bool((q.gather(-1, tokens.clamp(0, vocabulary - 1)[:, :, None]) > 0).all()):  # false for NaN
        raise ValueError("candidate logits: a drafted token has the probability 0, or the logits are no numbers")
    return q
