"""The prompts, by category, from held-out packages, a question file or a dataset; their batches; how long contexts are filled.

A question file is one such as Spec-Bench's `question.jsonl`: https://github.com/hemingkx/Spec-Bench (arXiv 2401.07851). A
tokenizer is always the target's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ...extras import did_you_mean, install
from ...zoo import corpus
from . import held_out

SETS = {
    "code": held_out.functions,
    "edits": held_out.edits,
    "json": held_out.records,
    "prose": held_out.docstrings,
}
"""The built-in sets, made from the sources of sympy and networkx."""
CHAT = Path(__file__).parent / "chat.jsonl"
"""The built-in set "chat": questions, edits, quotes and JSON for an instruct model, six of each."""
PROMPT_TOKENS = (120, 200)
SHORT_TOKENS = (60, 120)  # of prompts whose reading should take a small part of a short call
_CHARACTERS = 8  # per token, at most on average: longer texts are skipped without being tokenized
UNNAMED = "questions"  # the category of questions that name none
COLUMNS = ("turns", "question", "prompt", "instruction", "text", "content")  # one of them has the question


@dataclass(frozen=True)
class Prompt:
    """One text to continue.

    Args:
        source: where it comes from.
        category: under which it is reported.
        text: what the tokenizer got.
        ids: [1, P] int64.
    """

    source: str
    category: str
    text: str
    ids: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Prompts of one category that are decoded together.

    Args:
        category: of all prompts.
        ids: [B, P] int64, padded on the left.
        attention_mask: [B, P] int64.
    """

    category: str
    ids: torch.Tensor
    attention_mask: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.category, self.ids.to(device), self.attention_mask.to(device))


def read(names: Sequence[str], tokenizer: Any, count: int, tokens: tuple[int, int] = PROMPT_TOKENS) -> list[Prompt]:
    """Prompts of every set, `count` of each category, always the same ones.

    Args:
        names: of SETS; "chat"; a file like Spec-Bench's `question.jsonl` (a JSON object a line with `category` and `turns`, the
            first of which is asked); or a name for the `datasets` library, `NAME[:CONFIG][:SPLIT]`.
        tokenizer: the target's. Questions go through its chat template, if it has one.
        count: of each category.
        tokens: the least and the most of a prompt of SETS; prose may be shorter.

    Raises ValueError for an unknown name or too few prompts, ModuleNotFoundError without the held-out text.
    """
    if count < 1:
        raise ValueError(f"count: {count} prompts are nothing to measure; give 1 or more")
    found: list[Prompt] = []
    for name in names:
        if name in SETS:
            some = list(islice(_of_set(name, tokenizer, tokens), count))
            if len(some) < count:
                raise ValueError(f"count: {count} prompts of {name!r} wanted, {len(some)} there; ask for fewer")
        else:
            some = _questions(name, tokenizer, count)
        found += some
    if not found:
        raise ValueError(f"prompts: none chosen; give some of {', '.join(SETS)}, chat, a file or a dataset")
    return found


def short_prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """`count` prompts of the set "code" that take less time to read. Raises ValueError and ModuleNotFoundError as `read`."""
    return read(["code"], tokenizer, count, SHORT_TOKENS)


def held_out_prompts(tokenizer: Any) -> Iterator[Prompt]:
    """Functions of the held-out packages cut in the middle, always the same ones: one per file, without tests."""
    return _of_set("code", tokenizer, PROMPT_TOKENS)


def sources(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """Where prompts come from, by category."""
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt.source)
    return found


def at_length(prompts: Sequence[Prompt], tokenizer: Any, context: int) -> list[Prompt]:
    """The same prompts with exactly `context` tokens: short ones get held-out code in front, another piece for each, and long
    ones lose their beginning."""
    if context < 1:
        raise ValueError(f"context: {context} tokens are no text; give 1 or more")
    code = held_out.text(_CHARACTERS * 2 * context)
    filler = tokenizer(code, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids.long()
    found = []
    for number, prompt in enumerate(prompts):
        missing = max(0, context - prompt.ids.shape[1])
        if missing > filler.shape[1]:
            raise ValueError(
                f"context: {context} tokens are more than the {filler.shape[1]} of held-out code; give fewer"
            )
        start = number * context % max(1, filler.shape[1] - missing)
        filled = torch.cat([filler[:, start : start + missing], prompt.ids], 1)
        found.append(replace(prompt, ids=filled[:, -context:]))
    return found


def batches(prompts: Sequence[Prompt], rows: int = 1, pad: int = 0) -> list[Batch]:
    """Prompts in batches of one category each. If the last batch lacks some, it takes the category's first ones again.

    Args:
        prompts: what `read` returned.
        rows: of a batch.
        pad: the token that pads shorter prompts on the left.
    """
    if rows < 1:
        raise ValueError(f"batch: {rows} rows are nothing to decode; give 1 or more")
    categories: dict[str, list[torch.Tensor]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt.ids[0])
    found = []
    for category, members in categories.items():
        taken = list(islice(cycle(members), rows * math.ceil(len(members) / rows)))
        for start in range(0, len(taken), rows):
            some = taken[start : start + rows]
            ids = pad_sequence(some, batch_first=True, padding_value=pad, padding_side="left")
            mask = pad_sequence([*map(torch.ones_like, some)], batch_first=True, padding_side="left")
            found.append(Batch(category, ids, mask))
    return found


def _of_set(name: str, tokenizer: Any, tokens: tuple[int, int]) -> Iterator[Prompt]:
    """One prompt per file, with a length between the two of `tokens`."""
    fewest, most = tokens if name != "prose" else (tokens[0] // 3, tokens[1])
    for path in held_out.files():
        for part, text in SETS[name](corpus.read(path)):
            if len(text) > _CHARACTERS * most:
                continue
            ids = tokenizer(text, return_tensors="pt").input_ids.long()
            if fewest <= ids.shape[1] <= most:
                yield Prompt(f"{held_out.name_of(path)}: {part}", name, text, ids)
                break


def _questions(name: str, tokenizer: Any, count: int) -> list[Prompt]:
    path = CHAT if name == "chat" else Path(name)
    known = f"{', '.join(SETS)}, chat, a question file or a dataset"
    if name.isdigit():
        raise ValueError(f"prompts: {name!r} is a number; give some of {known}, and say how many by --count")
    if suggestion := did_you_mean(name, [*SETS, "chat"]) if name != "chat" and not path.exists() else "":
        raise ValueError(f"prompts: {name!r} is no set of prompts{suggestion} There are {known}")
    if path.suffix in (".jsonl", ".json") and not path.is_file():
        raise ValueError(f"prompts: {name!r} is no file here; give some of {known}")
    asked = _of_file(path) if path.is_file() else of_dataset(name)
    taken: dict[str, int] = {}
    found = []
    for title, category, question in asked:
        if taken.setdefault(category, 0) == count:
            if len(taken) == 1 and category == UNNAMED:
                break  # a dataset without categories may be long
            continue
        taken[category] += 1
        text = question
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=text is question).input_ids.long()
        found.append(Prompt(f"{name}: {title}", category, text, ids))
    if not found:
        raise ValueError(f"prompts: {name!r} has no questions in it; give some of {known}")
    return found


def _of_file(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, category and text of each question. A line is a JSON object: `category` (optional), and one of COLUMNS."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"prompts: line {number} of {path} is no JSON ({error})") from None
        if not isinstance(fields, dict):
            raise ValueError(f"prompts: line {number} of {path} is no JSON object")
        yield _question(fields, f"line {number} of {path}", number)


def of_dataset(name: str) -> Iterator[tuple[str, str, str]]:
    """The same of a dataset, NAME, NAME:SPLIT or NAME:CONFIG:SPLIT. Without a split, of the first one."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"prompts: {name!r} needs the datasets library: {install('bench')}") from error
    path, *rest = name.split(":")
    config, split = (rest[0] if len(rest) > 1 else None), (rest[-1] if rest else None)
    try:
        found = datasets.load_dataset(path, config, split=split, streaming=not Path(path).is_dir())
    except (OSError, ValueError, RuntimeError) as error:  # a missing dataset raises any of these
        raise ValueError(f"prompts: {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    if isinstance(found, dict):
        found = next(iter(found.values()))
    for number, fields in enumerate(found, 1):
        yield _question(fields, f"row {number} of {name}", number)


def _question(fields: dict[str, Any], where: str, number: int) -> tuple[str, str, str]:
    column = next((column for column in COLUMNS if fields.get(column)), None)
    if column is None:
        raise ValueError(f"prompts: {where} has none of the fields {', '.join(COLUMNS)}, only {', '.join(fields)}")
    value = fields[column]
    asked = value[0] if isinstance(value, (list, tuple)) else value  # the first of several turns
    if isinstance(asked, dict):  # a chat message
        asked = asked.get("content", "")
    return str(fields.get("question_id", number)), str(fields.get("category", UNNAMED)), str(asked)
