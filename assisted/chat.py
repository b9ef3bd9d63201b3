"""A conversation that keeps its KV cache from turn to turn.

Knows chat templates and what the cache holds; nothing of terminals or of drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from .modeling import AssistedModelForCausalLM

__all__ = ["ContextFull", "Conversation", "Reply"]


class ContextFull(ValueError):
    """The conversation has outgrown the model's context."""


@dataclass(frozen=True)
class Reply:
    """One answer.

    Args:
        text: what the model said, without special tokens.
        prompt_tokens: of the conversation before it.
        cached_tokens: how many of them were in the cache and not read again.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int


class Conversation:
    """Messages, and the tokens the model has read and written for them.

    Invariant between turns: `ids` is the conversation as the model saw it, `written` is its text, and the cache holds all
    of `ids` but the last token, or nothing.

    Args:
        model: the pair, with the target's tokenizer.
        system: a system message, or None.

    Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(self, model: AssistedModelForCausalLM, system: str | None = None):
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.system = system
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "target: its tokenizer has no chat template, so it was not made for conversations. Complete a text with "
                "`assisted generate`, or choose a chat (instruct) model."
            )
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []
        self.written: list[str] = []  # the text of all ids but the last, and of all
        self.cache = DynamicCache(config=model.target.config)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._forget_tokens()

    def say(self, message: str, max_new_tokens: int, **kwargs: Any) -> Reply:
        """Add a message and the model's answer to it.

        message: what the user says. max_new_tokens: of the answer; fewer where the model's context ends. kwargs: of `generate`.

        Raises ContextFull where no token fits behind the message. Whatever is raised, the message is taken back.
        """
        self.messages.append({"role": "user", "content": message})
        try:
            return self._answer(max_new_tokens, kwargs)
        except BaseException:
            self.messages.pop()
            self._forget_tokens()  # an interrupted call may have written to the cache
            raise

    def _answer(self, max_new_tokens: int, kwargs: dict[str, Any]) -> Reply:
        rendered = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        ids = self._extended(rendered)
        limit = getattr(self.model.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is not None and len(ids) >= limit:
            raise ContextFull(
                f"message: the conversation has {len(ids)} tokens, the model's context {limit}; /reset starts anew"
            )
        cached = self.cache.get_seq_length()
        inputs = torch.tensor([ids], device=self.model.target.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=self.cache,
            max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)),
            **kwargs,
        )
        self.ids = output[0].tolist()
        new = self.ids[len(ids) :]
        self.written = [rendered + self._decode(new[:-1]), rendered + self._decode(new)]
        text = self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages.append({"role": "assistant", "content": text})
        return Reply(text, len(ids), cached)

    def _extended(self, rendered: str) -> list[int]:
        """The tokens of the whole conversation: those the model has, grown, where the template only added to their text.

        Tokens of a text that was cut elsewhere differ, so it isn't tokenized again. The template may leave out the token
        that ended the answer, or may rewrite what was said (some drop a model's thoughts): then all is read anew.
        """
        for dropped, written in enumerate(reversed(self.written)):
            if rendered.startswith(written) and len(rendered) > len(written):
                added = self.tokenizer(rendered[len(written) :], add_special_tokens=False).input_ids
                return self.ids[: len(self.ids) - dropped] + added
        self._forget_tokens()
        return self.tokenizer(rendered, add_special_tokens=False).input_ids

    def _forget_tokens(self) -> None:
        self.ids, self.written = [], []
        self.cache = DynamicCache(config=self.model.target.config)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
