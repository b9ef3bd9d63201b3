"""Writes the folder that an engine reads: target, draft, the command that starts the engine, and a README.

Knows pairs and their specs. What an engine takes is in engines.py, the GGUF format in gguf.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from .. import drafters, zoo
from ..configuration import AssistedConfig
from ..drafters import Combined, DraftModel, Eagle, Medusa, Merged, NGram, QuantizedSelf, Spec, Suffix
from ..heads.eagle_config import default_taps
from ..heads.eagle_formats import save_eagle
from ..lengths import from_dict
from ..lengths.policies import Fixed
from ..loading.adapters import has_adapter
from ..loading.files import loading, require_sound
from ..loading.gguf import named_in, unmarked
from ..modeling import AssistedModelForCausalLM
from .engines import ENGINES, Engine, Job, Launch
from .gguf import require_writable, write_gguf

__all__ = ["Handover", "hand_over"]

KINDS: dict[type[Spec], str] = {
    DraftModel: "draft-model",
    Eagle: "eagle3",
    Medusa: "medusa",
    NGram: "ngram",
    Suffix: "suffix",
}
MTP = "mtp"
DTYPES = ("float32", "bfloat16", "float16")
_SETTINGS = ("max_ngram", "min_ngram", "max_match", "per_match", "min_probability", "remember")
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


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
    if draft_length is not None and (not isinstance(draft_length, int) or isinstance(draft_length, bool) or draft_length < 1):
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
    spec, quantization = _spec(found, draft), None
    kind = _kind(engine, spec)
    if isinstance(spec, DraftModel) and spec.quantization is not None:
        quantization, spec = spec.quantization, dataclasses.replace(spec, quantization=None)
    if isinstance(spec, Suffix) and spec.corpus:
        notes.append("The texts that the suffix draft looked up here are not handed over.")
    if quantization is not None:
        notes.append(
            f"The draft is quantized here ({_named(quantization)}) and handed over with its original weights: quantize it in the "
            "engine's own format if memory is short."
        )
    loaded = AssistedModelForCausalLM.from_pretrained(found, draft=spec, dtype=dtype or "auto")
    if kind in ("ngram", "suffix") and draft is None and not _is_saved(found):
        notes.append("No draft was named, so the pair has the default one, suffix.")
    return loaded


def _named(quantization: Any) -> str:
    return quantization if isinstance(quantization, str) else type(quantization).__name__


def _is_saved(path: str) -> bool:
    try:
        return isinstance(AutoConfig.from_pretrained(path), AssistedConfig)
    except (OSError, ValueError):
        return False


def _spec(path: str, draft: Any) -> Spec:
    """The spec of a draft that a caller names, or of a saved pair."""
    if draft is None and Path(path).is_dir() and named_in(path)[1] is None:
        require_sound(path, "target")
        with loading("target", path):
            config = AutoConfig.from_pretrained(path)
        if isinstance(config, AssistedConfig):
            return drafters.read(config.draft, Path(path))
    return drafters.parse(draft)


def _kind(engine: str, spec: Spec) -> str:
    """The engine's method for a spec. Raises ValueError, with the draft's name and what to use instead, if it has none."""
    has = ENGINES[engine]
    kind = KINDS.get(type(spec))
    if kind in has.kinds:
        return kind
    shown = {"draft-model": "a draft model", "eagle3": "an EAGLE-3 head", "medusa": "Medusa heads"}
    others = [shown.get(known, f"'{known}'") for known in has.kinds if known != MTP]
    instead = f"use {', '.join(others[:-1])} or {others[-1]}"
    if engine == "llamacpp" and kind == "eagle3":
        instead = (
            "transformers cannot read such a GGUF file back to verify it. Hand the head over to sglang, and run llama.cpp's own "
            f"convert_hf_to_gguf.py with --target-model-dir on its folder draft/; or {instead}"
        )
    if isinstance(spec, (Combined, Merged)):
        named = " or ".join(repr(part.name) for part in spec.parts())
        instead = f"hand over one of its drafts ({named}) by draft=, or {instead}"
    if isinstance(spec, QuantizedSelf):
        instead = f"the copy is made when a pair is loaded, and is no checkpoint; {instead}"
    raise ValueError(f"draft: {has.title} does not have {spec.name!r}: {instead}")


def _written(engine: str, pair: Any, folder: Path, length: int | None, notes: list[str]) -> Handover:
    """Check a loaded pair, then write it."""
    has, spec = ENGINES[engine], pair.spec
    kind = _kind(engine, spec)
    target = _plain(pair.target, "target")
    if pair.tokenizer is None:
        raise ValueError("pair: it has no tokenizer, and an engine needs one beside the target; pass tokenizer= on loading")
    drafter: Any = pair.drafter
    if length is None:
        length = _own_length(pair, kind) or has.kinds[kind]
        length = min(length, drafter.heads.heads) if kind == "medusa" else length
    job = Job(kind, length, str(target.dtype).removeprefix("torch."), {n: getattr(spec, n) for n in _SETTINGS if hasattr(spec, n)})
    draft_model = None
    if kind == "draft-model":
        draft_model, translated = _draft_model(has, pair, notes)
        job = dataclasses.replace(job, translated=translated)
    if kind == "eagle3":
        _require_head(has, drafter.head)
        taps = tuple(drafter.head.config.taps)
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        job = dataclasses.replace(
            job, taps=tuple(tap - 1 for tap in taps), default_taps=taps == default_taps(layers)
        )
    if kind == "medusa" and length > drafter.heads.heads:
        raise ValueError(f"draft_length: {length} is not possible with {drafter.heads.heads} Medusa heads; give at most that")
    launch = has.launch(job)
    if has.layout == "gguf":
        require_writable(target, pair.tokenizer, "target")
        if draft_model is not None:
            require_writable(draft_model, drafter.tokenizer or pair.tokenizer, "draft")
    folder.mkdir(parents=True, exist_ok=True)
    if has.layout == "gguf":
        write_gguf(target, pair.tokenizer, folder / "target.gguf", "target")
        if draft_model is not None:
            write_gguf(draft_model, drafter.tokenizer or pair.tokenizer, folder / "draft.gguf", "draft")
    else:
        _save(target, pair.tokenizer, folder / "target")
        if draft_model is not None:
            _save(draft_model, drafter.tokenizer or pair.tokenizer, folder / "draft")
        elif kind == "eagle3":
            save_eagle(drafter.head, folder / "draft", has.eagle_format, target)  # type: ignore[arg-type]
        elif kind == "medusa":
            drafter.heads.save(folder / "draft", "vllm", target)
    return _described(engine, folder, job, launch, notes)


def _own_length(pair: Any, kind: str) -> int | None:
    """The pair's draft length, if it is a fixed number. Of drafts from the text, it is not one that suits engines."""
    policy = pair.draft_length
    return policy.tokens if isinstance(policy, Fixed) and kind != "suffix" else None


def _plain(model: Any, role: str) -> PreTrainedModel:
    """A model that can be saved as an ordinary checkpoint. Raises ValueError for adapters and packed weights."""
    if has_adapter(model):
        raise ValueError(f"{role}: it has a PEFT adapter; merge it (merge_and_unload), save the result and hand that over")
    found = unmarked(model)
    if getattr(found.config, "quantization_config", None) is not None or getattr(found, "is_quantized", False):
        raise ValueError(
            f"{role}: it is quantized, and its checkpoint is not written again; hand over the unquantized model, or give the "
            "engine the quantized folder itself"
        )
    return found


def _draft_model(engine: Engine, pair: Any, notes: list[str]) -> tuple[PreTrainedModel, bool]:
    """The draft with as many tokens as the target, and whether it has another tokenizer."""
    drafter, spec = pair.drafter, pair.spec
    model = _plain(spec.model if isinstance(spec.model, PreTrainedModel) else drafter.models[0], "draft")
    size, own = (one.config.get_text_config(decoder=True).vocab_size for one in (pair.target, model))
    if isinstance(drafter, drafters.draft_model.TranslatedDrafter):
        if not engine.translates:
            raise ValueError(
                f"draft: its tokenizer is not the target's, and {engine.title} does not translate between the two; use a draft "
                "with the target's tokenizer (assisted train distill makes one), or 'ngram'"
            )
        return model, True
    if own != size:
        model = copy.deepcopy(model)
        model.resize_token_embeddings(size, mean_resizing=False)
        notes.append(f"The draft's vocabulary was {'cut' if own > size else 'padded'} from {own} to the target's {size} entries.")
    return model, False


def _require_head(engine: Engine, head: Any) -> None:
    """Raise ValueError for a head that the engine would read differently, or not at all."""
    config = head.config
    if config.version != 3:
        raise ValueError(
            f"draft: it is an EAGLE-1 head, and only EAGLE-3 heads are handed over to {engine.title}; train one (assisted train "
            "eagle), or use a draft model"
        )
    ignored = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    ignored = [name for name in ignored if name not in engine.norms]
    if ignored:
        raise ValueError(
            f"draft: the EAGLE-3 head has {' and '.join(ignored)}, which {engine.title} ignores, so it would run a different "
            "head; train it with assisted train eagle --no-norms, hand it over to vllm, or use a draft model"
        )


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary checkpoint that readers built on transformers 4 understand as well."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:  # transformers 5 nests what was flat before; older readers would take the default
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fields.setdefault("rope_theta", rope["rope_theta"])
        fields.setdefault("rope_scaling", None if scaling == {"rope_type": "default"} else scaling)
    if "dtype" in fields:
        fields.setdefault("torch_dtype", fields["dtype"])
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    words = folder / "tokenizer_config.json"
    if words.is_file():
        fields = json.loads(words.read_text(encoding="utf-8"))
        if fields.get("tokenizer_class") == "TokenizersBackend":  # the name that it had until transformers 5
            words.write_text(
                json.dumps(fields | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n", encoding="utf-8"
            )


def _mtp(engine: str, pair: Any, folder: Path, length: int | None, dtype: str | None) -> Handover:
    """A target with multi-token prediction layers of its own. transformers does not load these, so the files are copied."""
    has = ENGINES[engine]
    if MTP not in has.kinds:
        raise ValueError(f"draft: {has.title} gets no 'mtp' from here: its GGUF files would lack the layers; use 'ngram'")
    source = None if isinstance(pair, AssistedModelForCausalLM) else Path(zoo.resolve(str(pair)))
    if source is None or not (source / "config.json").is_file():
        raise ValueError("pair: 'mtp' copies the target's files; give the folder of its checkpoint")
    if dtype is not None:
        raise ValueError("dtype: 'mtp' copies the target's files as they are; leave dtype out")
    with loading("target", source):
        config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    fields = config.to_dict()
    layers = next((fields[name] for name in _MTP_LAYERS if fields.get(name)), 0)
    if not layers:
        raise ValueError(
            f"draft: the target in {str(source)!r} has no multi-token prediction layers ({' or '.join(_MTP_LAYERS)}); use another "
            "draft"
        )
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "auto").removeprefix("torch.")
    job = Job(MTP, length or has.kinds[MTP], stored, model_type=config.model_type)
    launch = has.launch(job)
    (folder / "target").mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copy2(file, folder / "target" / file.name)
    return _described(engine, folder, job, launch, [])


def _described(engine: str, folder: Path, job: Job, launch: Launch, notes: list[str]) -> Handover:
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
    (folder / "handover.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(found), encoding="utf-8")
    return found


_CONTENT = {
    "target": "the target, an ordinary checkpoint with its tokenizer",
    "target.gguf": "the target with its tokenizer",
    "draft.gguf": "the draft model with its tokenizer",
    "config.yaml": "the engine's options, named in the command",
    "handover.json": "this page for programs: method, command, options",
    "README.md": "this page",
}
_DRAFTS = {"draft-model": "the draft model, an ordinary checkpoint", "eagle3": "the EAGLE-3 head", "medusa": "the Medusa heads"}


def _readme(found: Handover) -> str:
    title = ENGINES[found.engine].title
    content = _CONTENT | {"draft": _DRAFTS.get(found.method, "")}
    tokens = "1 token" if found.tokens == 1 else f"{found.tokens} tokens"
    command = " \\\n  ".join(_lines(found.command))
    expected = [
        "The output is the target's own: at temperature 0 in float32, the same tokens as without a draft.",
        "Compare the engine's accepted tokens by position with `model.report.acceptance_by_position` of `assisted` on the same "
        "text. If they are far lower, the engine does not read the draft as it was made.",
        "The busier the server, the smaller the speedup. With a full batch, start it without the speculative options.",
    ]
    parts = [
        f"# A pair for {title}",
        f"A target, and a draft of the method `{found.method}` that proposes {tokens} in each round. Written by "
        "`assisted handover`.",
        "| file | content |\n|---|---|\n" + "\n".join(f"| `{name}` | {content.get(name, '')} |" for name in found.files),
        "## Start",
        f"In this folder:\n\n```bash\n{command}\n```",
        f"The options, by the names of {title}:\n\n```json\n{json.dumps(found.config, indent=2)}\n```",
        "## What to know",
        "\n".join(f"- {note}" for note in (*found.notes, *expected)),
    ]
    return "\n\n".join(parts) + "\n"


def _lines(command: tuple[str, ...]) -> list[str]:
    """The words of a command, each option with its value on a line."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        option = word.startswith("--") or not lines
        follows = bool(lines) and not option
        if follows:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
