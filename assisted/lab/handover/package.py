"""Writes the folder that an engine reads: target, draft, the command that starts the engine, and a README. Knows pairs and
how they are saved. What engines take is in engines.py and checks.py, the GGUF format in gguf.py."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from ... import methods as drafters
from ... import zoo
from ...configuration import AssistedConfig
from ...lengths.policies import Fixed
from ...loading.files import fields_of, loading, require_sound, write_json
from ...loading.gguf import named_in
from ...methods import Spec
from ...methods.eagle.config import default_taps
from ...methods.eagle.formats import save_eagle
from ...methods.mtp.formats import COUNTS
from ...modeling import AssistedModelForCausalLM
from .checks import MTP, draft_model, kind_of, plain_model, require_head
from .engines import DRAFTS, ENGINES, Job, Launch
from .gguf import require_writable, write_gguf

DTYPES = ("float32", "bfloat16", "float16")


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


def hand_over(
    engine: str,
    pair: str | os.PathLike[str] | AssistedModelForCausalLM,
    out: str | os.PathLike[str],
    draft: Any = None,
    draft_length: int | None = None,
    dtype: str | None = None,
) -> Handover:
    """Write a pair into a folder that a serving engine reads, with the command that starts the engine.

    Args:
        engine: "vllm", "sglang", "trtllm" (TensorRT-LLM) or "llamacpp".
        pair: a folder that `save_pretrained` wrote; or a target (Hub id, folder, GGUF file or `zoo:` name), with `draft`; or a
            loaded pair. None of them is changed.
        out: a new or empty folder.
        draft: as for `from_pretrained`. By default, a saved pair's own; of any other target "suffix". "mtp" stands for the
            target's own multi-token prediction layers.
        draft_length: number of tokens that the engine drafts in each round. By default that of the pair if it is a fixed
            number, otherwise one that suits the method.
        dtype: of the weights: "float32", "bfloat16" or "float16". By default the checkpoint's.

    Returns what was written; the same is in `handover.json` and README.md of the folder.

    Raises ValueError, with the name of the argument, for a draft that the engine does not have, and for models that it cannot
    read; ImportError that names the extra if a package is missing; OSError if nothing is found.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} is not known; one of {', '.join(ENGINES)}")
    if draft_length is not None and (type(draft_length) is not int or draft_length < 1):
        raise ValueError(f"draft_length: {draft_length!r} is not possible; engines take a number of tokens, 1 or more")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not known; one of {', '.join(DTYPES)}")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: {str(folder)!r} exists and is not an empty folder; name a new one")
    if isinstance(draft, str) and draft == MTP:
        return _mtp(engine, pair, folder, draft_length, dtype)
    notes: list[str] = []
    if not isinstance(pair, AssistedModelForCausalLM):
        pair = _loaded(engine, pair, draft, dtype, notes)
    elif draft is not None or dtype is not None:
        raise ValueError("draft, dtype: the pair is already loaded; load it with these, or pass its path as pair")
    return _written(engine, pair, folder, draft_length, notes)


def _loaded(engine: str, path: str | os.PathLike[str], draft: Any, dtype: str | None, notes: list[str]) -> Any:
    """The pair at a path, on the CPU. A draft that the engine does not have is rejected before weights are read."""
    if not str(path):
        raise ValueError("pair: the path is empty; name a saved pair, or a target")
    found = zoo.resolve(str(path))
    spec: Any = _spec(found, draft)
    if spec is not None:
        kind_of(engine, spec, draft)
    if spec is not None and spec.quantizes == "model" and spec.quantization is not None:
        named = spec.quantization if isinstance(spec.quantization, str) else type(spec.quantization).__name__
        notes.append(
            f"The draft is quantized here ({named}) and handed over with its original weights: quantize it in the engine's own "
            "format if memory is short."
        )
        spec = dataclasses.replace(spec, quantization=None)
    loaded = AssistedModelForCausalLM.from_pretrained(found, draft=spec, dtype=dtype or "auto")
    for field in dataclasses.fields(loaded.spec):  # type: ignore[arg-type]
        if getattr(loaded.spec, field.name) and not field.metadata.get("saved", True):
            notes.append(f"The draft's {field.name} is used here and not handed over.")
    return loaded


def _spec(path: str, draft: Any) -> Spec | None:
    """The spec of a draft that a caller names, or of a saved pair; None if only loading shows it, as from the Hub."""
    if draft is not None or named_in(path)[1] is not None:
        return drafters.parse(draft)
    if not Path(path).is_dir():
        return None
    require_sound(path, "target")
    with loading("target", path):
        config = AutoConfig.from_pretrained(path)
    return drafters.read(config.draft, Path(path)) if isinstance(config, AssistedConfig) else drafters.parse(None)


def _written(engine: str, pair: Any, folder: Path, length: int | None, notes: list[str]) -> Handover:
    has, drafter = ENGINES[engine], pair.drafter
    kind = kind_of(engine, pair.spec)
    target = plain_model(pair.target, "target")
    if pair.tokenizer is None:
        raise ValueError(
            "pair: it has no tokenizer, and an engine needs one beside the target; pass tokenizer= on loading"
        )
    models, translated, taps = {"target": (target, pair.tokenizer)}, False, ()
    if kind == "draft-model":
        model, translated = draft_model(has, pair, notes)
        models["draft"] = model, drafter.tokenizer or pair.tokenizer
    if kind == "eagle3":
        require_head(has, drafter.head, target)
        own = drafter.head.config.taps
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        taps = () if tuple(own) == default_taps(layers) else tuple(tap - 1 for tap in own)
    own_length = pair.draft_length.tokens if isinstance(pair.draft_length, Fixed) and kind != "suffix" else None
    tokens: int = length or own_length or has.kinds[kind]
    if kind == "medusa" and tokens > (heads := drafter.heads.heads):
        if length is not None:
            raise ValueError(f"draft_length: {length} is not possible with {heads} Medusa heads; give at most that")
        tokens = heads
    context = _context(*(model.config for model, _ in models.values()))
    dtype = str(target.dtype).removeprefix("torch.")
    job = Job(kind, tokens, dtype, vars(pair.spec), taps, translated, context=context)
    launch = has.launch(job)
    for role, (model, tokenizer) in models.items():
        if has.layout == "gguf":
            require_writable(model, tokenizer, role)
    folder.mkdir(parents=True, exist_ok=True)
    for role, (model, tokenizer) in models.items():
        if has.layout == "gguf":
            write_gguf(model, tokenizer, folder / f"{role}.gguf", role)
        else:
            _save(model, tokenizer, folder / role)
    if kind == "eagle3":
        save_eagle(drafter.head, folder / "draft", has.eagle_format, target)  # type: ignore[arg-type]
    elif kind == "medusa":
        drafter.heads.save(folder / "draft", "vllm", target)
    return describe(engine, folder, job, launch, notes)


def _context(*configs: Any) -> int | None:
    """Tokens that all of the models can read; None if no config tells."""
    found = [getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) for config in configs]
    return min(filter(None, found), default=None)


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary checkpoint that readers built on transformers 4 understand as well."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fields = fields_of(folder / "config.json")
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:  # transformers 5 nests what was flat before; older readers would take the default
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fields.setdefault("rope_theta", rope["rope_theta"])
        fields.setdefault("rope_scaling", None if scaling == {"rope_type": "default"} else scaling)
    if "dtype" in fields:
        fields.setdefault("torch_dtype", fields["dtype"])
    write_json(folder / "config.json", fields)
    words = folder / "tokenizer_config.json"
    if words.is_file() and (fields := fields_of(words)).get("tokenizer_class") == "TokenizersBackend":
        write_json(words, fields | {"tokenizer_class": "PreTrainedTokenizerFast"})  # its name until transformers 5


def _mtp(engine: str, pair: Any, folder: Path, length: int | None, dtype: str | None) -> Handover:
    """A target with multi-token prediction layers of its own. transformers does not load these, so the files are copied."""
    has = ENGINES[engine]
    if MTP not in has.kinds:
        raise ValueError(
            f"draft: {has.title} gets no 'mtp' from here: its GGUF files would lack the layers; use 'ngram'"
        )
    source = None if isinstance(pair, AssistedModelForCausalLM) else Path(zoo.resolve(str(pair)))
    if source is None or not (source / "config.json").is_file():
        raise ValueError("pair: 'mtp' copies the target's files; give the folder of its checkpoint")
    if dtype is not None:
        raise ValueError("dtype: 'mtp' copies the target's files as they are; leave dtype out")
    with loading("target", source):
        config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    fields = config.to_dict()
    layers = next((fields[name] for name in COUNTS if fields.get(name)), 0)
    if not layers:
        raise ValueError(
            f"draft: the target in {str(source)!r} has no multi-token prediction layers ({' or '.join(COUNTS)}); use "
            "another draft"
        )
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "auto").removeprefix("torch.")
    job = Job(MTP, length or has.kinds[MTP], stored, model_type=config.model_type, context=_context(config))
    launch = has.launch(job)
    (folder / "target").mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copy2(file, folder / "target" / file.name)
    return describe(engine, folder, job, launch, [])


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
