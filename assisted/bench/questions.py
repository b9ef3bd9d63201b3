"""Questions of a file such as Spec-Bench's `question.jsonl`, or of a dataset. Knows their fields, nothing of tokens.

Spec-Bench: https://github.com/hemingkx/Spec-Bench (arXiv 2401.07851).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import install

__all__ = ["UNNAMED", "Question", "of_dataset", "of_file"]

UNNAMED = "questions"
COLUMNS = ("turns", "question", "prompt", "instruction", "text", "content")


@dataclass(frozen=True)
class Question:
    """A question of a user.

    Args:
        name: its `question_id`, or its number.
        category: what it is reported under; UNNAMED where none is given.
        text: the question; the first one, if there are several turns.
    """

    name: str
    category: str
    text: str


def of_file(path: Path) -> Iterator[Question]:
    """The questions of a file with a JSON object a line: `category` (optional), and `turns` or another of COLUMNS.

    Raises ValueError for a line that is no such object.
    """
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


def of_dataset(name: str) -> Iterator[Question]:
    """The rows of a dataset, NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, in their order. Without a split, those of the first one.

    Raises ImportError without the `datasets` library, ValueError where nothing is found or no column is known.
    """
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


def _question(fields: dict[str, Any], where: str, number: int) -> Question:
    column = next((column for column in COLUMNS if fields.get(column)), None)
    if column is None:
        raise ValueError(f"prompts: {where} has none of the fields {', '.join(COLUMNS)}, only {', '.join(fields)}")
    value = fields[column]
    asked = value[0] if isinstance(value, (list, tuple)) else value
    if isinstance(asked, dict):  # a chat message
        asked = asked.get("content", "")
    return Question(str(fields.get("question_id", number)), str(fields.get("category", UNNAMED)), str(asked))
