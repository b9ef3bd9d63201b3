"""What was written for an engine: the record of it, for programs and as a README. Knows the folder's content by name;
models are written elsewhere."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from ...loading.files import write_json
from .engines import DRAFTS, ENGINES, Job, Launch


@dataclass(frozen=True)
class Handover:
    """What was written for an engine.

    Args:
        engine: "vllm", "sglang", "trtllm" or "llamacpp".
        folder: where it was written.
        method: the drafting method: "draft-model", "eagle3", "medusa", "ngram", "suffix" or "mtp".
        tokens: number of tokens that the engine drafts in each round.
        dtype: of the weights.
        command: the words that start the engine, to be run in the folder: paths are relative to it.
        config: the engine's options, by its own names.
        files: the files and folders in `folder`, sorted.
        notes: what the reader should know, one sentence or more each.
    """

    engine: str
    folder: str
    method: str
    tokens: int
    dtype: str
    command: tuple[str, ...]
    config: dict[str, Any]
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        """The command line, including the change to the folder."""
        return f"cd {shlex.quote(self.folder)}\n{shlex.join(self.command)}"


def describe(engine: str, folder: Path, job: Job, launch: Launch, notes: list[str]) -> Handover:
    """Write the files that describe the folder, and return their content."""
    for name, text in launch.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    found = Handover(
        engine,
        str(folder),
        job.kind,
        job.tokens,
        job.dtype,
        launch.command,
        launch.config,
        tuple(sorted([*(path.name for path in folder.iterdir()), "README.md", "handover.json"])),
        (*notes, *launch.notes),
    )
    fields = found.to_dict()
    del fields["folder"]  # a path of this machine
    write_json(folder / "handover.json", fields)
    content = _CONTENT | {"draft": DRAFTS.get(found.method, "")}
    page = Template(Path(__file__).with_name("readme.md").read_text(encoding="utf-8")).substitute(
        title=ENGINES[engine].title,
        method=found.method,
        tokens="1 token" if found.tokens == 1 else f"{found.tokens} tokens",
        files="\n".join(f"| `{name}` | {content.get(name, '')} |" for name in found.files),
        command=" \\\n  ".join(_lines(found.command)),
        options=json.dumps(found.config, indent=2),
        notes="".join(f"- {note}\n" for note in found.notes),
    )
    (folder / "README.md").write_text(page, encoding="utf-8")
    return found


_CONTENT = {
    "target": "the target, an ordinary checkpoint with its tokenizer",
    "target.gguf": "the target with its tokenizer",
    "draft.gguf": "the draft model with its tokenizer",
    "config.yaml": "the engine's options, named in the command",
    "handover.json": "this page for programs: method, command, options",
    "README.md": "this page",
}


def _lines(command: tuple[str, ...]) -> list[str]:
    """The words of a command, each option with its value on a line."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines
