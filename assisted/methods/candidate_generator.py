"""Other people's drafters: any `CandidateGenerator`, the interface of transformers' own assisted generation, drafts here.

Nothing that it returns is trusted: what does not fit raises an error, which ends drafting for the call and changes no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.candidate_generator import CandidateGenerator

from ..core.drafts import Draft, Round
from ..core.host import on_device
from ..core.text import Text
from ..distribution import probabilities
from .shared.base import Call, Drafter, Drafting, Spec, Target
from .shared.registry import register


@register("candidates")
@dataclass(frozen=True)
class Candidates(Spec):
    """A candidate generator of transformers' interface drafts chains.

    Args:
        generator: a `CandidateGenerator`, for one sequence at a time; or a function that makes one for each sequence of a call,
            for batches, and for generators that keep something of the text. It is given the ids of the prompt, [1, P] int64.
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
        """Raises ValueError for a batch with one generator."""
        if isinstance(self.spec.generator, CandidateGenerator) and (rows := call.target.cache.rows) > 1:
            raise ValueError(
                f"draft: this {type(self.spec.generator).__name__} drafts for one sequence, and the call has {rows}; pass a "
                "function that makes one for each sequence, Candidates(lambda input_ids: ...)"
            )
        return CandidatesDrafting(self.spec, call)


class CandidatesDrafting(Drafting):
    """One `generate`, with a generator for each row."""

    def __init__(self, spec: Candidates, call: Call):
        self.spec, self.call = spec, call
        self.generators: dict[int, CandidateGenerator] = {}  # of the rows that were asked
        self.text: Text | None = None
        self.proposed: Draft | None = None  # until it is verified

    def propose(self, text: Text, budget: int) -> Draft:
        self.text, device = text, text.ids.device
        wants_q = self.call.distribution.do_sample and self.spec.honest_logits
        tokens = [torch.zeros(0, dtype=torch.int64, device=device) for _ in range(text.rows)]
        found: list[torch.Tensor | None] = [None] * text.rows
        for row in text.unfinished:
            ids = self._ids(row)
            if row not in self.generators:
                self.generators[row] = self._made(ids.clone())
            given, logits = self.generators[row].get_candidates(ids.clone())
            tokens[row] = _continuation(given, ids)[0, :budget]
            if wants_q and logits is not None and len(tokens[row]):
                found[row] = _distributions(logits, tokens[row], self.call.vocab_size)
        lengths = on_device([len(row) for row in tokens], device)
        drafting = [row for row in text.unfinished if len(tokens[row])]
        q = None
        if drafting and all(found[row] is not None for row in drafting):
            nothing = torch.zeros(0, self.call.vocab_size, device=device)
            q = pad_sequence([nothing if one is None else one for one in found], batch_first=True)
        draft = Draft(pad_sequence(tokens, batch_first=True), lengths, q)
        self.proposed = draft.checked(text.rows, self.call.vocab_size, device)
        return draft

    def observe(self, round: Round) -> None:
        """Tell the generators what became of their drafts."""
        if round.draft.is_that_of(self.proposed):
            for row, count in enumerate(round.drafted):
                if count and row in self.generators:
                    logits = round.logits[row : row + 1, : count + 1].clone()
                    self.generators[row].update_candidate_strategy(self._ids(row).clone(), logits, round.accepted[row])
        self.proposed = None

    def _ids(self, row: int) -> torch.Tensor:
        """[1, n] int64, the text of a row without the padding before it."""
        assert self.text is not None
        mask = self.call.attention_mask
        first = 0 if mask is None else int(mask[row].int().argmax())
        return self.text.ids[row : row + 1, first : self.text.lengths[row]]

    def _made(self, ids: torch.Tensor) -> CandidateGenerator:
        """The generator of a row. ids: [1, P] int64."""
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
    """[n, V] float32, the distributions that the tokens [n] are said to be drawn from. Raises ValueError for logits that they
    cannot be drawn from."""
    count = len(tokens)
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else []
    if len(shape) != 3 or shape[0] != 1 or shape[1] < count or shape[2] != vocabulary:
        raise ValueError(f"candidate logits: expected [1, {count} or more, {vocabulary}], got {shape}")
    q = probabilities(logits[0, :count].to(tokens.device, torch.float32))
    if not bool((q.gather(-1, tokens.clamp(0, vocabulary - 1)[:, None]) > 0).all()):  # false for NaN
        raise ValueError("candidate logits: a drafted token has the probability 0, or the logits are no numbers")
    return q
