"""GGUF files: recognising their paths, loading models from them, and making the loaded models savable. Knows transformers'
`gguf_file` and the quantization config that it leaves on a model; nothing of drafting or of the format."""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file, is_gguf_available

from ..engine.libraries import GgufConfig, dequantized, gguf_kinds, gguf_tensors
from ..extras import install
from .files import gguf_files, loading, of_hub
from .gguf_config import complete
from .gguf_tokenizer import complete_tokenizer, end_tokens


def named_in(path: str) -> tuple[str, str | None]:
    """(folder, file) if `path` is a GGUF file or a folder whose only model is one; otherwise (path, None)."""
    file = Path(path)
    if len(found := gguf_files(file)) == 1:
        return path, found[0].name
    if file.suffix != ".gguf" or not file.is_file():
        return path, None
    return str(file.parent), str(file.absolute())  # transformers resolves a bare name in the working directory


@contextmanager
def reading_once() -> Iterator[None]:
    """Within this context, the metadata of a GGUF file is parsed once.

    transformers parses it for the config, the weights and the tokenizer, each time with the package gguf, in Python, item by
    item, and makes the same table of names for every module. With a vocabulary of 49,152 tokens that takes a minute and a half;
    read once, and through a plain array instead of a memory map, an eighth of that. May be nested.
    """
    gguf: Any = importlib.import_module("gguf") if _is_installed() else None
    if gguf is None or not isinstance(gguf.GGUFReader, type):  # an outer context has replaced it
        yield
        return

    class Reader(gguf.GGUFReader):
        def _build_fields(self, offs: int, count: int) -> int:
            self.data: Any = self.data.view(np.ndarray)  # each slice of a memory map sets up a memory map
            end = super()._build_fields(offs, count)
            for name, field in self.fields.items():
                if name.startswith("gpt-oss.rope.scaling."):
                    field.parts[0] = field.contents()  # transformers (5.24) takes the first part, the name's length
            return int(end)

    own = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(Reader), functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = own


@contextmanager
def _every_kind() -> Iterator[None]:
    """Within this context, transformers expands every type of quantized weights that the package gguf knows.

    It reads some architectures (Qwen3.5, LFM2) with a reader of its own, which lacks Q5_0, Q5_1 and MXFP4, among others.
    """
    gguf: Any = importlib.import_module("gguf")
    sizes, expanders = gguf_kinds()
    lacking = {kind: size for kind, size in gguf.GGML_QUANT_SIZES.items() if size[0] > 1 and kind not in sizes}

    def expand(kind: Any, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind)).to(dtype)

    sizes.update(lacking)
    expanders.update({kind: functools.partial(expand, kind) for kind in lacking})
    try:
        yield
    finally:
        for kind in lacking:
            sizes.pop(kind, None)
            expanders.pop(kind, None)


def read_config(path: str, gguf_file: Any, config: PretrainedConfig | None = None, **hub: Any) -> PretrainedConfig:
    """The model configuration in a GGUF file of a folder or a Hub repository.

    config: returned instead, if given. hub: for `AutoConfig.from_pretrained`.

    Raises ValueError if `gguf_file` is not a file name, if `path` is a saved pair, and for a broken file; ImportError that
    names the extra to install if the package gguf is missing; OSError if the file does not exist.
    """
    if not isinstance(gguf_file, (str, os.PathLike)) or not str(gguf_file):
        raise ValueError(f"gguf_file: {gguf_file!r} is not a file; give the name of a .gguf file in the model's folder")
    if (config.model_type if config is not None else _type_beside(path, **hub)) == "assisted":
        raise ValueError(
            f"gguf_file: {path!r} is a saved pair, whose target is not in a GGUF file; leave gguf_file out"
        )
    if config is not None:
        return config
    with _reading("target", path, gguf_file):
        return _config_in(path, gguf_file, hub)


def load_model(path: str, role: str = "target", **kwargs: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`, where `path` may also be a GGUF file. role, kwargs: as for `load_gguf`."""
    folder, gguf_file = named_in(path)
    if gguf_file is not None:
        return load_gguf(folder, gguf_file, role, **kwargs)
    with loading(role, path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    return model


def load_gguf(path: str, gguf_file: str, role: str, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(path, gguf_file=...)`, by default with dequantized weights.

    A `quantization_config` in kwargs can keep the weights packed. role: "target" or "draft", for the message. model_args,
    kwargs: for `from_pretrained`. Raises as `read_config` does.
    """
    if kwargs.get("quantization_config") is None:
        kwargs.update(dequantized())
    with _reading(role, path, gguf_file):
        config = kwargs["config"] = kwargs.get("config") or _config_in(path, gguf_file, of_hub(kwargs))
        place = place_of(path, gguf_file, kwargs)
        layers, tensors = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1), gguf_tensors(place)
        if not isinstance(layers, int) or not 0 < layers <= tensors:  # before they are allocated
            raise ValueError(f"{role}: {place}: block_count: {layers!r} layers, but the file has {tensors} tensors")
        kept = getattr(kwargs.get("quantization_config"), "dequantize", True) is False
        with nullcontext() if kept or not _is_installed() else _every_kind():
            model: PreTrainedModel
            model, found = AutoModelForCausalLM.from_pretrained(
                path, *model_args, gguf_file=gguf_file, output_loading_info=True, **kwargs
            )
        if missing := sorted(found["missing_keys"]):  # transformers makes them up
            raise ValueError(
                f"{role}: {place}: transformers finds no tensor in it for {len(missing)} weights of {type(model).__name__}, "
                f"such as {missing[0]}; load the original checkpoint"
            )
        ends = end_tokens(importlib.import_module("gguf").GGUFReader(place))
    if len(ends) > 1 and model.generation_config is not None:
        model.generation_config.eos_token_id = ends
    if not _is_packed(model):
        _unmark(model)
    return model


def load_tokenizer(path: str, gguf_file: str, **hub: Any) -> Any:
    """`AutoTokenizer.from_pretrained(path, gguf_file=...)`, with all that the file states."""
    with reading_once():
        tokenizer = AutoTokenizer.from_pretrained(path, gguf_file=gguf_file, **hub)
        complete_tokenizer(tokenizer, importlib.import_module("gguf").GGUFReader(place_of(path, gguf_file, hub)))
    return tokenizer


def unmarked(model: PreTrainedModel) -> PreTrainedModel:
    """A model that can be saved: `model`, or a shallow copy without the GGUF quantization config.

    transformers marks every model from a GGUF file as quantized, even if its weights are dequantized. The copy shares modules
    and weights. Raises ValueError if the weights are still packed.
    """
    if not isinstance(getattr(model.config, "quantization_config", None), GgufConfig):
        return model
    if _is_packed(model):
        raise ValueError(
            "gguf_file: the weights of this model are still packed as in the GGUF file, and transformers cannot save them; "
            "load it with quantization_config=GgufConfig(dequantize=True)"
        )
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    _unmark(other)
    return other


def place_of(path: str, gguf_file: str, kwargs: Mapping[str, Any]) -> str:
    """Where a GGUF file of a folder or a Hub repository is on this machine. kwargs: with Hub arguments among others."""
    return cached_file(path, gguf_file, **of_hub(kwargs))


@dataclass(frozen=True)
class Stored:
    """A tensor in a GGUF file. shape: as in transformers."""

    shape: tuple[int, ...]
    tensor: Any

    def numbers(self) -> np.ndarray:
        """Its numbers, expanded: float32 of its shape."""
        found = importlib.import_module("gguf").quants.dequantize(self.tensor.data, self.tensor.tensor_type)
        return np.array(found, np.float32).reshape(self.shape)


def file_of(path: str | Path) -> Path | None:
    """The GGUF file at a path, or in a folder whose only model it is; None if there is none."""
    folder, name = named_in(str(path))
    return None if name is None else Path(folder, name)


def stored(file: Path) -> tuple[str, int, dict[str, Stored]]:
    """The architecture in a GGUF file, the number of MTP layers that it announces, and its tensors by llama.cpp's names.

    Raises ValueError for a broken file, ImportError that names the extra if the package gguf is missing."""
    with _reading("draft", str(file.parent), file.name):
        reader = importlib.import_module("gguf").GGUFReader(file)
        kind = str(reader.fields["general.architecture"].contents())
        announced = reader.fields.get(f"{kind}.nextn_predict_layers")
        tensors = {t.name: Stored(tuple(int(size) for size in reversed(t.shape)), t) for t in reader.tensors}
    return kind, 0 if announced is None else int(announced.contents()), tensors


def naming(kind: str, blocks: int) -> Callable[[str], str | None]:
    """What llama.cpp calls a module of transformers, such as `model.layers.0.mlp`, by the package gguf. kind: the architecture
    in a file. blocks: its number of layers."""
    gguf = importlib.import_module("gguf")
    return gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == kind), blocks).get_name


def _config_in(path: str, gguf_file: str | os.PathLike[str], hub: Mapping[str, Any]) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(path, gguf_file=gguf_file, **hub)
    complete(config, importlib.import_module("gguf").GGUFReader(place_of(path, os.fspath(gguf_file), hub)))
    return config


def _type_beside(path: str, **hub: Any) -> Any:
    """The `model_type` in the config.json beside a GGUF file, None if there is none: GGUF files do not need one."""
    try:
        return PretrainedConfig.get_config_dict(path, **hub)[0].get("model_type")
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _unmark(model: PreTrainedModel) -> None:
    for name in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized = False


def _is_packed(model: PreTrainedModel) -> bool:
    return any(type(module).__module__.startswith("transformers.integrations.gguf") for module in model.modules())


@contextmanager
def _reading(role: str, path: str, gguf_file: str | os.PathLike[str]) -> Iterator[None]:
    """`loading`, and if the package gguf is missing, the error says how to install it."""
    try:
        with reading_once(), loading(role, os.path.join(path, gguf_file)):
            yield
    except ImportError as error:
        if _is_installed():
            raise
        raise ImportError(f"gguf_file: reading {str(gguf_file)!r} needs the package gguf: {install('gguf')}") from error


def _is_installed() -> bool:
    try:
        importlib.import_module("gguf")
    except ImportError:
        return False
    return bool(is_gguf_available())
