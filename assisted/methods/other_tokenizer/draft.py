"""Drafting with a causal LM that has another tokenizer: universal drafting (2502.05202).

The committed text is translated into the draft's tokens (translation.py), and the draft's slots follow these. Drafts are
translated back in one of two ways: token by token in the shared vocabulary (TLI), or as text that the target's tokenizer
splits into tokens (SLEM).
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.acceptance import top1
from ...core.drafts import Draft, Round
from ...core.host import padded
from ...core.text import Text
from ...distribution import probabilities
from ...engine.cache import SlotCache
from ...engine.kept import Kept
from ...engine.runner import CachedModel
from ...engine.traits import Traits
from ...lengths.cost_model import KEEP_LOCAL, DecayedMean
from ...loading.vocabulary import Vocabulary
from ..shared.base import Call
from ..shared.chain import ChainDrafting
from ..shared.model_drafter import ModelDrafter
from ..shared.trees import from_lists
from .translation import TranslatedText, Translation

TOKENS, TEXT = "tokens", "text"


class TranslatedDrafter(ModelDrafter):
    """A causal LM whose drafts are translated.

    Args:
        model: the draft; not changed.
        vocab_size: of the target's logits.
        tokenizer, target_tokenizer: of the draft and of the target.

    Attributes:
        ways: of translating a draft, "text" (SLEM) and "tokens" (TLI). At temperature 0, only the first is used, because
            measurements show a higher acceptance rate. Otherwise, both are tried in this order, and each call uses the one
            with more accepted tokens.

    Raises ValueError if the vocabularies share no text.
    """

    translates = True

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
    ):
        super().__init__(model, tokenizer)
        self.kept = Kept(None)  # translations need all tokens
        own_size = Traits.of(model).vocabulary
        self.translation = Translation(Vocabulary(target_tokenizer, vocab_size), Vocabulary(tokenizer, own_size))
        self.ways: tuple[str, ...] = (TEXT, TOKENS)

    def start(self, call: Call) -> TranslatedDrafting:
        return TranslatedDrafting(self, call)


ModelDrafter.translated = TranslatedDrafter


class TranslatedDrafting(ChainDrafting):
    """The draft's slots and the committed text in its tokens during one `generate`.

    Invariant before each round: the slots of row b hold the KV of `padding[b]` hidden columns and then of the tokens `held[b]`.
    The first `agreed[b]` of these are a prefix of the committed text in the draft's tokens.
    """

    def __init__(self, drafter: TranslatedDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        # text without q is enough, unless tokens are sampled or processors change the distribution
        free = call.distribution.do_sample or call.distribution.processors
        self.choice = _Choice(drafter.ways if free else drafter.ways[:1])
        self.runner: CachedModel | None = None
        self.rows: list[TranslatedText] = []
        self.taken: list[int] = []  # number of translated columns, per row
        self.padding: list[int] = []
        self.held: list[list[int]] = []
        self.agreed: list[int] = []
        self.fed: list[torch.Tensor] = []  # draft tokens [B, 1] read after the committed text, one per forward pass
        self.to_draft = torch.empty(0)
        self.untranslatable = torch.empty(0)
        self.proposed: tuple[Draft, str] | None = None  # with its way, until it is verified

    def propose(self, text: Text, budget: int) -> Draft:
        runner = self.runner or self._begin(text)
        # translate what was committed since the last round: the only transfer of the text to the host
        for row, new in enumerate(text.since(self.taken)):
            if not text.ended[row]:
                self.rows[row].extend(new)
        self.taken = list(text.lengths)
        room = runner.room([len(self.rows[row].tokens) for row in text.unfinished]) - 1
        if room < 1:  # the text may have more tokens for the draft than for the target
            return Draft.empty(text.rows, text.ids.device)
        if not self.held:
            self._read_prompt(runner)
        logits = self._read_committed(runner, text)
        way = self.choice.pick()
        draft = (self._as_tokens if way == TOKENS else self._as_text)(text, budget, room, logits)
        self.proposed = draft, way
        return draft

    def observe(self, round: Round) -> None:
        """Record the acceptance of the way used. The slots are compared with the text later, when it is translated."""
        if self.proposed is not None and round.draft.is_that_of(self.proposed[0]):
            self.choice.observe(self.proposed[1], round.mean(round.accepted))
        self.proposed = None

    def _as_tokens(self, text: Text, budget: int, room: int, logits: torch.Tensor) -> Draft:
        """TLI: draft a chain with the draft's distribution restricted to the shared tokens. The restriction is applied to the
        logits, so q is the normalised distribution that tokens are drawn from. Processors change it as they change p."""

        def read(tokens: torch.Tensor) -> torch.Tensor:
            size = self.drafter.translation.draft.size
            return self._shared(self._read(self.to_draft[tokens].clamp(max=size - 1), text), text)

        return self.draft_chain(text, min(budget, room), self._shared(logits, text), read)

    def _as_text(self, text: Text, budget: int, room: int, logits: torch.Tensor) -> Draft:
        """SLEM: the draft writes its top-1 tokens, and the target's tokenizer splits the text.

        There is no q, so the target's own choice must match, which is exact for any draft. On average, the length policy is
        asked once per target token.
        """
        self.require_numbers()
        length = self.call.length
        per_token = sum(len(row.tokens) for row in self.rows) / max(1, sum(row.read for row in self.rows))
        steps = min(room, math.ceil(budget * min(4.0, per_token)))
        going = ~torch.tensor(text.ended, device=text.ids.device)
        broken = torch.tensor(False, device=text.ids.device)
        written: list[torch.Tensor] = []
        lasting: list[torch.Tensor] = []
        asked = 0
        for step in range(steps):
            scores = logits.to(text.ids.device)[:, : len(self.untranslatable)].float() + self.untranslatable
            if step >= asked * per_token:
                if length.needs_q:
                    going = going & length.go_on(asked, probabilities(scores)).to(going.device)
                    if not going.any():
                        break
                asked += 1
            written.append(top1(scores)[:, None])
            lasting.append(going)
            broken = broken | scores.isnan().any()
            if step + 1 == steps or (step + 1 >= asked * per_token and not length.run_again(asked)):
                break
            logits = self._read(written[-1], text)
        self.broken = broken
        if not written:
            return Draft.empty(text.rows, text.ids.device)
        table, counts = torch.cat(written, 1).tolist(), torch.stack(lasting).sum(0).tolist()
        translated = [row.to_target(table[i][: counts[i]])[:budget] for i, row in enumerate(self.rows)]
        return from_lists(translated, None, text.ids.device)

    def _shared(self, logits: torch.Tensor, text: Text) -> torch.Tensor:
        """[B, V'] draft logits -> [B, V] in the target's vocabulary, -inf for tokens that are not shared."""
        logits = logits.to(text.ids.device)[:, : self.drafter.translation.draft.size]
        return pad(logits, (0, 1), value=float("-inf"))[:, self.to_draft]

    def _begin(self, text: Text) -> CachedModel:
        drafter = self.drafter
        self.rows = [TranslatedText(drafter.translation) for _ in text.lengths]
        for row, tokens in zip(self.rows, text.prompts(self.call.attention_mask), strict=True):
            row.extend(tokens)
        self.taken = [text.prompt_length] * text.rows
        self.to_draft = drafter.translation.to_draft.to(text.ids.device)
        self.untranslatable = drafter.translation.untranslatable.to(text.ids.device)
        cache = SlotCache(text.rows, 4 * self.call.limit, right_aligned=not drafter.masks.trees)
        self.runner = drafter.runner(cache, self.call.settings)
        return self.runner

    def _read_prompt(self, runner: CachedModel) -> None:
        """Read the translated prompts; shorter rows are padded on the left."""
        longest = max(len(row.tokens) for row in self.rows)
        self.padding = [longest - len(row.tokens) for row in self.rows]
        self.held = [list(row.tokens) for row in self.rows]
        self.agreed = [0] * len(self.rows)
        ids = torch.tensor([[0] * hidden + row for hidden, row in zip(self.padding, self.held, strict=True)])
        seen = torch.arange(longest) >= torch.tensor(self.padding)[:, None]
        runner.prefill(ids, seen.long().to(runner.device) if any(self.padding) else None)

    def _read_committed(self, runner: CachedModel, text: Text) -> torch.Tensor:
        """Rewind to where slots and text differ, then read to the end, at least one token per row. Returns logits [B, V']."""
        cache = runner.cache
        if self.fed:
            for held, fed in zip(self.held, torch.cat(self.fed, 1).tolist(), strict=True):
                held += fed
            self.fed = []
        new: list[list[int]] = []
        for row, (translated, held) in enumerate(zip(self.rows, self.held, strict=True)):
            tokens, common = translated.tokens, self.agreed[row]
            while common < min(len(held), len(tokens) - 1) and held[common] == tokens[common]:
                common += 1
            new.append(tokens[common:])
            held[common:] = new[row]
            self.agreed[row] = min(translated.settled, len(tokens) - 1)
        unread = [len(tokens) for tokens in new]
        starts = zip(self.padding, self.held, unread, strict=True)
        cache.rewind([hidden + len(held) - count for hidden, held, count in starts])
        used = [0 if ended else count for count, ended in zip(unread, text.ended, strict=True)]
        logits = runner(padded(new, "cpu"), used=used)
        cache.commit(unread)
        return logits[torch.arange(text.rows), torch.tensor(unread) - 1]

    def _read(self, tokens: torch.Tensor, text: Text) -> torch.Tensor:
        """Read one more draft token in every row, [B, 1] -> logits [B, V']."""
        assert self.runner is not None
        logits = self.runner(tokens, used=[int(not ended) for ended in text.ended])[:, -1]
        self.runner.cache.commit([1] * text.rows)
        self.fed.append(tokens)
        return logits


class _Choice:
    """Chooses the way of the next draft: the one with more accepted tokens lately, and the other one every 16th round."""

    trials, probe = 2, 16

    def __init__(self, ways: tuple[str, ...]):
        self.ways = ways
        self.rounds = 0
        self.seen = dict.fromkeys(ways, 0)
        self.accepted = {way: DecayedMean() for way in ways}

    def pick(self) -> str:
        self.rounds += 1
        for way in self.ways:
            if self.seen[way] < self.trials:
                return way
        if self.rounds % self.probe == 0:
            return min(self.ways, key=self.seen.__getitem__)
        return max(self.ways, key=lambda way: self.accepted[way].mean())

    def observe(self, way: str, accepted: float) -> None:
        self.seen[way] += 1
        for mean in self.accepted.values():  # what was seen long ago counts little, whichever way was used since
            mean.add(0.0, 0.0, KEEP_LOCAL)
        self.accepted[way].add(accepted)
