"""A conversation in a session, which keeps what target and drafter have read from turn to turn.

Handles chat templates and tokens; knows nothing of terminals or drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .modeling import AssistedModelForCausalLM

__all__ = ["ContextFull", "Conversation", "Reply"]


class ContextFull(ValueError):
    """The conversation is longer than the model's context."""


@dataclass(frozen=True)
class Reply:
    """One answer.

    Args:
        text: the answer, without special tokens.
        prompt_tokens: length of the conversation before it.
        cached_tokens: how many of these were in the cache and not read again.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int


def require_text(name: str, text: str) -> None:
    """Raise ValueError for an argument whose text no tokenizer takes: a terminal's bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: it is not UTF-8 ({error.reason} at character {error.start})") from error


class Conversation:
    """Messages and their tokens.

    Invariant between turns: `ids` are all tokens that the model has read or generated, `written` is their text, and the session
    holds all of `ids` but the last token; or all are empty. A model with a pool (`sessions`) needs no session.

    Args:
        model: the pair, with the target's tokenizer.
        system: a system message, or None.

    Raises ValueError for a tokenizer without a chat template.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    written: list[str]  # the text of all ids but the last, and the text of all ids

    def __init__(self, model: AssistedModelForCausalLM, system: str | None = None):
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.system = system
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "target: its tokenizer has no chat template, so the model was not trained for conversations. Complete a text "
                "with `assisted generate`, or choose a chat (instruct) model."
            )
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._forget_tokens()

    def prepare(self, **kwargs: Any) -> None:
        """Do the one-time work that the first answer would wait for (packed weights, captured passes), with a few tokens that
        are thrown away. kwargs: of `generate`."""
        rendered = self.tokenizer.apply_chat_template(
            [*self.messages, {"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
        )
        inputs = self.tokenizer(rendered, add_special_tokens=False, return_tensors="pt").to(self.model.target.device)
        self.model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **{"max_new_tokens": 4} | kwargs)

    def say(self, message: str, max_new_tokens: int, **kwargs: Any) -> Reply:
        """Add a message and the model's answer to it.

        message: the user's text. max_new_tokens: limit of the answer, lower if the model's context ends earlier. kwargs: of
        `generate`.

        Raises ContextFull if no token fits after the message, and ValueError for a message that is no text. After any exception
        the message is removed again.
        """
        require_text("message", message)
        self.messages.append({"role": "user", "content": message})
        try:
            return self._answer(max_new_tokens, kwargs)
        except BaseException:
            self.messages.pop()
            self._forget_tokens()
            raise

    def _answer(self, max_new_tokens: int, kwargs: dict[str, Any]) -> Reply:
        rendered = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        ids = self._extended(rendered)
        limit = getattr(self.model.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is not None and len(ids) >= limit:
            raise ContextFull(
                f"message: the conversation has {len(ids)} tokens, the model's context {limit}; /reset starts a new one"
            )
        past = {} if self.session is None else {"past_key_values": self.session}
        inputs = torch.tensor([ids], device=self.model.target.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)),
            **past,
            **kwargs,
        )
        self.ids = output[0].tolist()
        new = self.ids[len(ids) :]
        self.written = [rendered + self._decode(new[:-1]), rendered + self._decode(new)]
        text = self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages.append({"role": "assistant", "content": text})
        return Reply(text, len(ids), 0 if self.model.report is None else self.model.report.cached_tokens)

    def _extended(self, rendered: str) -> list[int]:
        """The tokens of the whole conversation: the known ones and those of the text that the template has added.

        The known text is not tokenized again, because other cuts give other tokens. The template may leave out the end token
        of an answer. It may also rewrite earlier messages (some drop a model's thoughts): then all is tokenized again, and the
        session finds out what it has read of it.
        """
        for dropped, written in enumerate(reversed(self.written)):
            if rendered.startswith(written) and len(rendered) > len(written):
                added = self.tokenizer(rendered[len(written) :], add_special_tokens=False).input_ids
                return self.ids[: len(self.ids) - dropped] + added
        return self.tokenizer(rendered, add_special_tokens=False).input_ids

    def _forget_tokens(self) -> None:
        self.ids, self.written = [], []
        self.session = self.model.session() if self.model.sessions is None else None

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
