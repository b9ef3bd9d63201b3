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
        text: the answer, without special tokens; of `Conversation.more`, what it added.
        prompt_tokens: length of the conversation before it.
        cached_tokens: how many of these were in the cache and not read again.
        cut: whether it ended without an end token, at its limit say.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    cut: bool = False


def require_text(name: str, text: str) -> None:
    """Raise ValueError for an argument whose text no tokenizer takes: a terminal's bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: it is not UTF-8 ({error.reason} at character {error.start})") from error


class Conversation:
    """Messages and their tokens.

    Invariant between turns: `ids` are all tokens that the model has read or generated, `written` is their text, and the session
    holds all of `ids` but the last token, or nothing; or all are empty. A model with a pool (`sessions`) needs no session.

    Args:
        model: the pair, with the target's tokenizer.
        system: a system message, or None.

    Raises ValueError for a tokenizer without a chat template.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    written: list[str]  # the text of all ids but the last, and the text of all ids
    prompt: tuple[str, int]  # the text before the last answer, and its number of tokens
    cut: bool  # whether `more` may go on with the last answer

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

    def restore(self, messages: list[dict[str, str]]) -> None:
        """Go on from these messages: dictionaries with `role` and `content`. Raises ValueError for anything else."""
        names = ("role", "content")
        if not isinstance(messages, list) or not all(
            isinstance(one, dict) and all(isinstance(one.get(name), str) for name in names) for one in messages
        ):
            raise ValueError('messages: give a list of {"role": ..., "content": ...} with texts')
        self.messages = [{name: one[name] for name in names} for one in messages]
        self.system = next((one["content"] for one in self.messages if one["role"] == "system"), None)
        self._forget_tokens()

    def prepare(self, **kwargs: Any) -> None:
        """Do the one-time work that the first answer would wait for (packed weights, captured passes), with a few tokens that
        are thrown away. kwargs: of `generate`."""
        messages = [*self.messages, {"role": "user", "content": "Hello"}]
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
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

    def more(self, max_new_tokens: int, **kwargs: Any) -> Reply:
        """Go on with the last answer, which ended without an end token. Arguments: as for `say`.

        Raises ContextFull if no token fits, and ValueError if there is no such answer. After any exception the answer is as
        before.
        """
        if not self.cut:
            raise ValueError("message: there is no answer that was cut, so none can go on")
        before = self.messages.pop()
        try:
            return self._write(self.ids, max_new_tokens, kwargs)
        except BaseException:
            self.messages.append(before)
            self.session = self._new_session()
            raise

    def _answer(self, max_new_tokens: int, kwargs: dict[str, Any]) -> Reply:
        rendered = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        ids = self._extended(rendered)
        self.prompt = rendered, len(ids)
        return self._write(ids, max_new_tokens, kwargs)

    def _write(self, ids: list[int], max_new_tokens: int, kwargs: dict[str, Any]) -> Reply:
        """Let the model write after these tokens: those of the prompt, and perhaps the beginning of the answer."""
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
        rendered, start = self.prompt
        new, shown = self.ids[start:], self._decode(ids[start:], skip_special_tokens=True)
        self.written = [rendered + self._decode(new[:-1]), rendered + self._decode(new)]
        ends = self.model.generation_config.eos_token_id
        self.cut = self.ids[-1] not in (ends if isinstance(ends, list) else [ends])
        text = self._decode(new, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        cached = 0 if self.model.report is None else self.model.report.cached_tokens
        return Reply(text[len(shown) :], len(ids), cached, self.cut)

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
        self.ids, self.written, self.cut = [], [], False
        self.session = self._new_session()

    def _new_session(self) -> Any:
        return self.model.session() if self.model.sessions is None else None

    def _decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **options)
