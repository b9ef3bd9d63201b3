"""Model files: checked before loading, since they are untrusted, and copied. Errors name the broken file, and nothing large
is allocated. Raises ValueError for files that exist but cannot be used; for missing files, OSError is left to the loading
code. Knows JSON, safetensors headers and the folders that a saved pair may refer to; nothing of drafting."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    file_exists,
    get_safetensors_metadata,
    hf_hub_download,
    parse_local_safetensors_file_metadata,
    parse_safetensors_file_metadata,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError
from huggingface_hub.utils import TensorInfo
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as bars

Shapes = Mapping[str, tuple[int, ...]]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "n_embd", "d_model", "ffn_dim", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "draft_vocab_size", "target_hidden_size"),
)
_PACKED = 16  # maximum numbers packed into one element of a quantized checkpoint
_MOST = 2**31  # limit of sizes that no tensor shows, such as the context length
_NUMBERS = """temperature top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty max_time length_penalty
diversity_penalty encoder_repetition_penalty guidance_scale"""
_COUNTS = """max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences top_k no_repeat_ngram_size
bos_token_id pad_token_id eos_token_id"""
_SWITCHES = """do_sample use_cache output_scores output_logits return_dict_in_generate output_attentions
output_hidden_states"""
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(_NUMBERS.split(), ("a number", (int, float))),
    **dict.fromkeys(_COUNTS.split(), ("an integer", (int,))),
    **dict.fromkeys(_SWITCHES.split(), ("true or false", (bool,))),
}
"""Of the fields of a generation config: what a value has to be."""
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
UNLISTED = ("*mtp*.safetensors", "*extra*.safetensors")
"""Files with MTP layers or the like that stand beside a model's, in some checkpoints without an entry in the index."""
_ABOUT_AN_ARGUMENT = re.compile(r"[a-z_0-9.]+(, [a-z_0-9.]+)*: ")  # the beginning of this package's own messages


def of_hub(arguments: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Those of the arguments of `from_pretrained` that say where a file of the Hub is. more: names of others to keep."""
    return {name: arguments[name] for name in (*HUB_ARGUMENTS, *more) if name in arguments}


def fields_of(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError that names the file if there is anything else in it."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(fields).__name__}")
    return fields


def write_json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def copy_files(path: str, folder: Path, *patterns: str) -> None:
    """Copy the files of a checkpoint, which is a folder or a Hub id, that match one of the patterns."""
    origin = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=[*patterns]))
    folder.mkdir(parents=True, exist_ok=True)
    for file in (file for pattern in patterns for file in origin.glob(pattern)):
        shutil.copyfile(file, folder / file.name)


def copy_processor(path: str, *folders: Path) -> None:
    """Copy what a checkpoint holds of a processor for pictures or sounds, if it can be found. path: a folder or a Hub id."""
    found = local_folder(path) if path else None  # a model in memory may have any name
    for folder in folders:
        if found is not None and found.resolve() != folder.resolve():
            copy_files(str(found), folder, "*processor_config.json", "chat_template.*")


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a checkpoint file; tensors are not read. Raises ValueError that names a broken file."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="meta", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} is broken: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ValueError(f"{file}: expected a dict of tensors")
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def stored_in(file: Path) -> dict[str, TensorInfo]:
    """The header of a safetensors file, by tensor. Raises ValueError that names a broken file."""
    try:
        return parse_local_safetensors_file_metadata(file).tensors
    except (SafetensorsParsingError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file} is broken: its header cannot be read") from error


def headers(folder: str, path: str, role: str, hub: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The header of each tensor in a model's safetensors files.

    folder: or a Hub id, of which only the headers are read. path: as the caller named it. role: the argument that named it.
    hub: `revision` and `token`. Raises ValueError where there are no such files, OSError for an unknown id.
    """
    if Path(folder).is_dir():
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{role}: the folder {path!r} has a config but no *.safetensors files, and so no weights to count"
            )
        return {name: tensor for file in files for name, tensor in stored_in(file).items()}
    try:
        metadata = get_safetensors_metadata(folder, **hub)
        listed: dict[str, str] = {}
        if not metadata.sharded and file_exists(folder, SAFE_WEIGHTS_INDEX_NAME, **hub):  # see `files_by_tensor`
            listed = fields_of(Path(hf_hub_download(folder, SAFE_WEIGHTS_INDEX_NAME, **hub))).get("weight_map", {})
        beside = [
            parse_safetensors_file_metadata(folder, file, **hub)
            for file in sorted({file for name, file in listed.items() if name not in metadata.weight_map})
        ]
    except NotASafetensorsRepoError as error:
        raise ValueError(
            f"{role}: {path!r} has no weights in safetensors files, whose headers tell the sizes"
        ) from error
    except HfHubHTTPError as error:
        raise OSError(
            f"{role}: the headers of {path!r} cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error
    held = (*beside, *metadata.files_metadata.values())
    return {name: tensor for file in held for name, tensor in file.tensors.items()}


def write_index(folder: Path, target: str) -> None:
    """Write the index of a saved pair's weights, which are in its subfolder `target`: a Trainer that resumes from a checkpoint
    loads its model's weights through this index. If only an adapter is there, remove the index instead."""
    own = folder / SAFE_WEIGHTS_INDEX_NAME
    sharded, single = folder / target / SAFE_WEIGHTS_INDEX_NAME, folder / target / SAFE_WEIGHTS_NAME
    if sharded.is_file():
        files = fields_of(sharded)["weight_map"]
    elif single.is_file():
        files = dict.fromkeys(stored_in(single), SAFE_WEIGHTS_NAME)
    else:
        own.unlink(missing_ok=True)
        return
    size = sum((folder / target / name).stat().st_size for name in set(files.values()))
    places = {name: f"{target}/{file}" for name, file in files.items()}
    write_json(own, {"metadata": {"total_size": size}, "weight_map": places})


def require_sizes(fields: Mapping[str, Any], shapes: Shapes, where: str | Path, exact: bool = False) -> None:
    """Reject sizes that are not positive integers or that exceed the tensors, before a model of that size is allocated.

    Every layer has at least one tensor, and every width is a dimension of some tensor.

    fields: of a config. where: its file, for the message. exact: the tensors are not packed by a quantization, and no size is a
    list with one entry per layer. Raises ValueError that names the file and the field.
    """
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    largest = max((math.prod(shape) for shape in shapes.values()), default=0)
    limits = dict.fromkeys(_LAYERS, len(shapes)) | dict.fromkeys(_WIDTHS, widest if exact else _PACKED * largest)
    limits["max_position_embeddings"] = _MOST
    for name in limits.keys() & fields.keys():
        given = fields[name]
        for value in given if isinstance(given, list) and not exact else [given]:
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{where}: {name}: {value!r} is not a size; expected an integer of 1 or more")
            if value > limits[name] and (shapes or name == "max_position_embeddings"):
                raise ValueError(
                    f"{where}: {name}: {value} does not match the checkpoint's tensors ({len(shapes)} tensors, largest "
                    f"dimension {widest})"
                )


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that names no other model, sorted."""
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    return sorted(folder.glob("*.gguf"))


def require_sound(path: str | Path, role: str) -> None:
    """Reject a model folder with broken or inconsistent files, before anything is loaded.

    path: a folder, or a Hub id, for which only files in the local cache are checked. role: "target" or "draft", for the
    message.

    Raises ValueError that names the file and, if one is wrong, the field.
    """
    folder = local_folder(path)
    if folder is None:
        return
    if found := gguf_files(folder):
        raise ValueError(f"{role}: {folder} has {', '.join(file.name for file in found)}; name one of these files")
    try:
        config, generation, _ = (
            fields_of(folder / name) if (folder / name).is_file() else {}
            for name in ("config.json", "generation_config.json", "adapter_config.json")
        )
        shapes = _shapes_in(folder)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                require_sizes(part, shapes, folder / "config.json")
        _require_kinds(generation, folder / "generation_config.json")
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from error


def files_by_tensor(folder: Path) -> dict[str, str]:
    """The file, in the folder, of each tensor of a checkpoint; {} if it has no safetensors files.

    What model.safetensors holds is read from there, as transformers does; the index decides of everything else, also beside
    that file, where quantizers list the tensors that transformers did not load. Tensors that neither lists are looked for in
    files that quantizers and converters are known to add without an entry. Raises ValueError for a broken file and for one
    outside the folder.
    """
    files = _listed(folder)
    for file in sorted({file for pattern in UNLISTED for file in folder.glob(pattern)}):
        if file.name not in files.values():
            files = dict.fromkeys(stored_in(file), file.name) | files
    return files


def _listed(folder: Path) -> dict[str, str]:
    """`files_by_tensor`, without files that the index does not name."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    names = fields_of(index).get("weight_map") if index.is_file() else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index}: weight_map: expected a file name for each tensor")
    for name in sorted(set(names.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index}: weight_map: {name} is outside the folder; a checkpoint's files are in it")
    return names | (dict.fromkeys(stored_in(single), SAFE_WEIGHTS_NAME) if single.is_file() else {})


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a model's safetensors files. Raises ValueError for a missing or broken file."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / "adapter_model.safetensors").is_file():
        shapes_of(folder / "adapter_model.safetensors")
    if single.is_file():
        return shapes_of(single)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(set(_listed(folder).values())):
        if not (folder / name).is_file():
            if folder.parent.name == "snapshots":
                return {}  # of the Hub's cache: it may not have been downloaded yet
            raise ValueError(f"{index}: weight_map: {name} is missing in {folder}")
        shapes |= shapes_of(folder / name)
    return shapes


def _require_kinds(fields: Mapping[str, Any], where: Path) -> None:
    """Reject values of a generation config that have the wrong type. Raises ValueError."""
    for name in fields.keys() & _KINDS.keys():
        given, (what, kinds) = fields[name], _KINDS[name]
        for value in given if isinstance(given, list) and name == "eos_token_id" else [given]:
            wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            if value is not None and (wrong or value != value):
                raise ValueError(f"{where}: {name}: {value!r} is not {what}")


def local_folder(path: str | Path) -> Path | None:
    """The folder at `path`, or the cache folder of a Hub id that was downloaded before; None if there is neither."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    try:
        config = try_to_load_from_cache(str(path), "config.json")
    except ValueError:  # not a Hub id
        return None
    return Path(config).parent if isinstance(config, str) else None


def inside(folder: Path, name: Any, where: str) -> Path:
    """The subfolder `name` of a saved pair's folder. where: the config field that holds the name, for the message.

    Its files may be links, as in the Hub's cache. The subfolder itself must not link to a place outside.

    Raises ValueError if the name is not a string, is absolute or refers to a place outside.
    """
    if isinstance(name, str) and name.strip() and not Path(name).is_absolute() and ".." not in Path(name).parts:
        path, root = (folder / name).resolve(), folder.resolve()
        if path != root and path.is_relative_to(root):
            return folder / name
    raise ValueError(f"{where}: {name!r} leads out of the saved pair's folder {folder}; expected a folder inside it")


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars while models load."""
    before = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            bars.enable_progress_bar()


@contextmanager
def loading(role: str, path: str | Path, remedy: str = "") -> Iterator[None]:
    """Turn errors while loading the files at `path` into ValueError that names the path, or OSError if nothing is found.

    remedy: what to try after another library's error, with the punctuation before it.

    These pass unchanged: ImportError, unknown keyword arguments, and out of memory.
    """
    try:
        yield
    except (ImportError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if _ABOUT_AN_ARGUMENT.match(str(error)):
            raise
        raise OSError(f"{role}: {str(path)!r} cannot be loaded as a folder or as a Hub id: {error}") from error
    except BaseException as error:
        panics = type(error).__name__ == "PanicException"  # of Rust code: tokenizers and safetensors
        if not isinstance(error, Exception) and not panics:
            raise
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise
        is_ours = type(error) is ValueError or type(error).__module__.startswith("assisted.")
        if is_ours and _ABOUT_AN_ARGUMENT.match(str(error)):
            raise
        told = str(error) if is_ours else f"{type(error).__name__}: {error}{remedy}"
        raise ValueError(f"{role}: loading {str(path)!r} failed: {told}") from error
