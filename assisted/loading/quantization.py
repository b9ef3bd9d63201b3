"""Quantized drafts: named quantization configs, workarounds for the backends, saving, and memory use.

Knows the defects of each backend; nothing of drafting. A quantized model is saved as its original weights: every backend
here quantizes the same weights to the same bits, but none of them saves quantized tensors reliably.
"""

from __future__ import annotations

import copy
import importlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..engine.libraries import attention_of, is_wrapper_subclass, storage_key, unpack_in_torch
from ..engine.parts import few_ids, unwrapped
from ..extras import install
from .adapters import base_path, copy_adapter, has_adapter, save_adapter, trusting
from .gguf import unmarked
from .packed import HEAD_BITS, PackedConfig

__all__ = [
    "NAMES",
    "copy_shells",
    "load_quantized",
    "memory_bytes",
    "quantize_copy",
    "require_runs",
    "resolve",
    "rounds_by_pass",
    "save_quantized",
    "stored_bytes",
]

Quantization: TypeAlias = str | dict[str, Any] | QuantizationConfigMixin

BACKENDS = {"bitsandbytes": "bitsandbytes", "quanto": "optimum.quanto", "torchao": "torchao"}
RECORD = "assisted_quantization"  # the field of config.json where save_quantized records how to quantize again
HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")

# Shapes that the CPU kernels require; with others they raise or crash. Applied on all devices, so that drafts are the same.
FOUR_BIT_OUT, FOUR_BIT_IN = 32, 64  # bitsandbytes packs 32 rows together and scales blocks of 64 along a row
QUANTO_INT8_IN = 16  # other widths crash the process in bfloat16

_SCALED_PER_PASS = ("torch.ao.nn.quantized.dynamic.", "torch.nn.quantized.dynamic.")


def _four_bit(kind: str) -> Callable[[torch.dtype], QuantizationConfigMixin]:
    # Compute in the model's own dtype: another one would cost casts in every layer.
    return lambda dtype: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)


def _torchao_int8(dtype: torch.dtype) -> QuantizationConfigMixin:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# Names mean the same on every machine, so that saved pairs do, too.
_CONFIGS: dict[str, tuple[str, Callable[[torch.dtype], QuantizationConfigMixin]]] = {
    "nf4": ("bitsandbytes", _four_bit("nf4")),
    "fp4": ("bitsandbytes", _four_bit("fp4")),
    "int8": ("assisted_packed", lambda dtype: PackedConfig(8)),
    "int4": ("assisted_packed", lambda dtype: PackedConfig(4)),
    "int8-bitsandbytes": ("bitsandbytes", lambda dtype: BitsAndBytesConfig(load_in_8bit=True)),
    "int4-quanto": ("quanto", lambda dtype: QuantoConfig(weights="int4")),
    "int8-quanto": ("quanto", lambda dtype: QuantoConfig(weights="int8")),
    "int8-torchao": ("torchao", _torchao_int8),
}
NAMES: tuple[str, ...] = tuple(_CONFIGS)
_UNPACKED = {8: "int8-bitsandbytes", 4: "int4-quanto"}  # by bits, what replaces weights that are packed for a CPU


def resolve(
    quantization: Quantization | None, dtype: torch.dtype, packed: bool = True
) -> QuantizationConfigMixin | None:
    """The transformers config for a name of `NAMES`; a config object or its dict is copied.

    "int8" and "int4" are the fastest weights of that size that a device has: on a CPU `PackedConfig`, which needs no further
    package; elsewhere "int8-bitsandbytes" (LLM.int8(), which also quantizes activations and casts them to float16) and
    "int4-quanto". "nf4" and "fp4" are bitsandbytes' 4-bit formats, "int8-quanto" is optimum-quanto's and "int8-torchao"
    torchao's; these quantize weights only.

    dtype: that the model computes in. packed: whether `PackedConfig` can be used, which is on a CPU.

    Raises ValueError for unknown names and types, ImportError if the backend is missing.
    """
    method = _resolved(quantization, dtype)
    if isinstance(method, PackedConfig) and not packed:
        return _resolved(_UNPACKED[method.bits], dtype)
    return method


def _resolved(quantization: Quantization | None, dtype: torch.dtype) -> QuantizationConfigMixin | None:
    """`resolve` with packed weights."""
    if quantization is None:
        return None
    if isinstance(quantization, str):
        if quantization not in _CONFIGS:
            raise ValueError(
                f"quantization: {quantization!r} is not known; use one of {', '.join(NAMES)}, "
                "or a transformers quantization config"
            )
        method, make = _CONFIGS[quantization]
        _require(method)
        return make(dtype)
    if isinstance(quantization, dict):
        if not quantization.keys() & {"quant_method", "load_in_4bit", "load_in_8bit"}:
            raise ValueError(f"quantization: {quantization!r} has no quant_method; use one of {', '.join(NAMES)}")
        _require(quantization.get("quant_method", "bitsandbytes"))  # dicts with load_in_4bit may omit it
        return AutoQuantizationConfig.from_dict(quantization)
    if not isinstance(quantization, QuantizationConfigMixin):
        raise ValueError(
            f"quantization: expected one of {', '.join(NAMES)}, a transformers quantization config or its dict, "
            f"got {type(quantization).__name__}"
        )
    _require(quantization.quant_method)
    return copy.deepcopy(quantization)


def load_quantized(
    path: str,
    quantization: Quantization | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(path)`, quantized except for layers that the backend would compute incorrectly.

    If `path` is a PEFT adapter, its base model is quantized.

    quantization: None loads the checkpoint as it is or, if `save_quantized` wrote it, quantizes it as recorded there.
    dtype: of computation and of unquantized weights; None or "auto" takes the checkpoint's.
    device_map, kwargs: for `from_pretrained`. Raises ValueError if no layer can be quantized, or if all are already.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    base = base_path(path, "draft", **hub)
    hub, kwargs = trusting(path, base, **hub), trusting(path, base, **kwargs)
    config = AutoConfig.from_pretrained(base, **hub)
    if quantization is not None and getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"quantization: the model at {path!r} is quantized already; leave quantization out")
    if quantization is None:
        quantization = getattr(config, RECORD, None)
    packed = _device_type(device_map) == "cpu" and base == path  # PEFT adapts no packed layers
    method = resolve(quantization, _computed_in(dtype, config), packed)
    if method is not None:
        with torch.device("meta"):  # _guarded needs shapes only
            shapes = AutoModelForCausalLM.from_config(config, trust_remote_code=kwargs.get("trust_remote_code"))
        kwargs["quantization_config"] = _guarded(method, shapes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map, **kwargs)
    model.config.__dict__.pop(RECORD, None)
    return _settled(model)


def quantize_copy(model: PreTrainedModel, quantization: Quantization) -> PreTrainedModel:
    """A quantized copy of a loaded model, on the same devices. Unquantized weights are shared, not copied.

    Raises ValueError if the model has an adapter, is already quantized, or has offloaded weights.
    """
    if has_adapter(model):
        raise ValueError("quantization: the model has an adapter; merge it (merge_and_unload()), or use another draft")
    model = unmarked(model)
    if _is_quantized(model):
        raise ValueError("quantization: the model is quantized already; quantize a copy of the original")
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("quantization: part of the model is offloaded; load it into memory, or use another draft")
    method = resolve(quantization, model.dtype, packed=model.device.type == "cpu")
    if method is None:
        raise ValueError(f"quantization: None makes no quantized copy; use one of {', '.join(NAMES)}")
    # Not by way of a folder: save_pretrained would modify the config of the model that it saves.
    copied: PreTrainedModel = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=model.state_dict(),
        dtype=model.dtype,
        device_map=getattr(model, "hf_device_map", None) or {"": model.device},
        attn_implementation=attention_of(model.config),
        quantization_config=_guarded(method, model),
    )
    copied.generation_config = copy.deepcopy(model.generation_config)
    copied.name_or_path = copied.config.name_or_path = ""  # these weights are at no path
    return _settled(copied)


def save_quantized(model: PreTrainedModel, folder: str | Path, source: str | PreTrainedModel | None = None) -> None:
    """Save a draft such that `load_quantized(folder)` restores it bit for bit.

    The folder is an ordinary checkpoint of the original weights; config.json also records how to quantize them. An unquantized
    model is saved as it is. Of a model with a PEFT adapter, only the adapter is saved, with the path of its base model; the
    quantization must then be given again when loading.

    source: the path or the unquantized model that `model` was quantized from; None for the path it was loaded from.

    Raises ValueError if the original weights are unknown or differ, and for a quantized model with an adapter unless `source`
    is the adapter's path.
    """
    if has_adapter(model):
        if not _is_quantized(unwrapped(model)):
            save_adapter(model, folder, "draft")
        elif isinstance(source, str):
            copy_adapter(source, folder)
        else:
            raise ValueError(
                "draft: a loaded quantized model with an adapter cannot be saved; pass the adapter's path as draft instead"
            )
        return
    model = unmarked(model)
    if not _is_quantized(model):
        model.save_pretrained(folder)
        return
    source = model.name_or_path if source is None else source
    original = _original(model, source)
    if isinstance(source, PreTrainedModel) or Path(source).resolve() != Path(folder).resolve():
        if _is_quantized(original):  # transformers cannot save a model from a prequantized checkpoint
            _copy_checkpoint(str(source), Path(folder))
        else:
            original.save_pretrained(folder)
    config = copy.deepcopy(original.config)
    config.architectures, config.dtype = [type(original).__name__], model.dtype
    if not _is_quantized(original):  # otherwise its config already holds the method
        setattr(config, RECORD, model.config.quantization_config.to_dict())
    config.save_pretrained(folder)


@torch.no_grad()
def require_runs(model: PreTrainedModel, quantization: Any) -> None:
    """Reject a quantized draft that cannot run: some models use products that a backend's weights do not support.

    quantization: as the caller gave it, for the message. Raises ValueError.
    """
    try:
        model(input_ids=few_ids(model), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = quantization if isinstance(quantization, str) else type(quantization).__name__
        raise ValueError(
            f"draft_quantization: {type(model).__name__} does not run in {name} ({type(error).__name__}: "
            f"{str(error)[:200]}); choose another of {', '.join(NAMES)}, or another draft"
        ) from error


def rounds_by_pass(model: nn.Module) -> str | None:
    """The reason why the result for one token depends on the other tokens of its forward pass; None if it does not.

    Some dynamic quantization scales all activations of a forward pass by the largest one: torch's own, and torchao's with
    `PerTensor`. Scales per token do not have this effect.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_SCALED_PER_PASS):
            return f"{name} quantizes its inputs by the largest number of a forward pass"
        activations = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)
        if type(getattr(activations, "granularity", None)).__name__ == "PerTensor":
            return f"{name} quantizes its inputs with one scale for a whole forward pass"
    return None


def copy_shells(memo: dict[int, Any], *models: nn.Module) -> None:
    """Put copies of quanto's weights, which `copy.deepcopy` cannot copy, into the memo for it."""
    for model in models:
        for weight in model.parameters():
            if type(weight).__module__.startswith("optimum.quanto"):
                memo.setdefault(id(weight), nn.Parameter(_shell(weight, memo), requires_grad=weight.requires_grad))


def _shell(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy of a tensor, which may be a wrapper subclass around other tensors."""
    if not is_wrapper_subclass(tensor):
        return copy.deepcopy(tensor, memo)
    names, how = tensor.__tensor_flatten__()
    inner = {name: _shell(getattr(tensor, name), memo) for name in names}
    return type(tensor).__tensor_unflatten__(inner, how, tensor.size(), tensor.stride())


def stored_bytes(model: PreTrainedModel, quantization: str | None, dtype: torch.dtype, copy: bool = False) -> int:
    """The bytes that the weights of a model take once they are loaded, from its shapes; it may be on the meta device.

    quantization: a name of `NAMES`, or None. dtype: of weights that are not quantized. copy: count only what a quantized copy
    does not share with its original. Raises ValueError for an unknown name and if no layer can be quantized.
    """
    shared = sum({id(weight): weight.numel() for weight in model.parameters()}.values()) * dtype.itemsize
    if quantization is None:
        return 0 if copy else shared
    if quantization not in _BYTES:
        raise ValueError(f"quantization: {quantization!r} is not known; use one of {', '.join(NAMES)}")
    tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
    packs, head = quantization in ("int8", "int4"), model.get_output_embeddings()
    skipped = [] if packs else [*get_keys_to_not_convert(model)]
    needs_out, needs_in = (FOUR_BIT_OUT, FOUR_BIT_IN) if quantization in ("nf4", "fp4") else (1, 1)
    needs_in = QUANTO_INT8_IN if quantization == "int8-quanto" else needs_in
    replaced = made = 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or not should_convert_module(name, skipped):
            continue
        out, into = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        if out % needs_out or into % needs_in:
            continue
        kind = f"int{HEAD_BITS}" if packs and module is head else quantization
        made += _BYTES[kind](out, into, dtype.itemsize)
        replaced += 0 if name in tied else out * into * dtype.itemsize  # an embedding stays beside its quantized head
    if not made:
        raise ValueError(
            f"quantization: no layer of {type(model).__name__} has a shape that {quantization!r} can quantize"
        )
    return made if copy else shared - replaced + made


def _blocks(number: int, of: int) -> int:
    return -(-number // of)


# Bytes of one weight, [out, in], by the size of a number that is not quantized.
_BYTES: dict[str, Callable[[int, int, int], int]] = {
    **dict.fromkeys(("nf4", "fp4"), lambda out, into, size: out * into // 2 + 4 * _blocks(out * into, 64) + 64),
    "int8": lambda out, into, size: out * (16 * _blocks(into, 16) + 2),
    "int4": lambda out, into, size: 16 * _blocks(out, 16) * _blocks(into, 32) * (16 + 4),
    "int8-bitsandbytes": lambda out, into, size: out * (into + 4),
    "int4-quanto": lambda out, into, size: out * into // 2 + 2 * size * _blocks(out * into, 128),
    "int8-quanto": lambda out, into, size: out * (into + size),
    "int8-torchao": lambda out, into, size: out * (into + size),
}


def memory_bytes(*models: nn.Module, buffers: bool = True) -> int:
    """Bytes of the stored weights, buffers and quantization state of models. Shared storage counts once.

    buffers: whether to count buffers.
    """
    found = (
        storage
        for model in models
        for module in model.modules()
        for owner in (
            *module._parameters.values(),
            *(module._buffers.values() if buffers else ()),
            getattr(module, "state", None),
        )
        for storage in _storages(owner)
    )
    return sum({(one.device, storage_key(one)): one.nbytes() for one in found}.values())


def _storages(owner: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor, or of the object in which a backend keeps its scales."""
    if isinstance(owner, torch.Tensor) and is_wrapper_subclass(owner):
        for name in owner.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # quanto, torchao: a wrapper around the tensors with the data
            yield from _storages(getattr(owner, name))
        return
    if isinstance(owner, torch.Tensor):
        yield owner.untyped_storage()
    if type(owner).__module__.startswith("bitsandbytes"):  # its weights, QuantState, MatmulLtState
        for value in vars(owner).values():
            yield from _storages(value)


def _require(method: Any) -> None:
    """Import the backend of a quantization method, or raise ImportError with the install command. Skip unknown methods."""
    backend = BACKENDS.get(str(getattr(method, "value", method)))
    if backend is None:
        return
    try:
        importlib.import_module(backend)
    except ImportError as error:
        extra = "torchao" if backend == "torchao" else "quant"
        raise ImportError(f"quantization: this needs {backend}: {install(extra)}") from error


def _computed_in(dtype: torch.dtype | str | None, config: PretrainedConfig) -> torch.dtype:
    chosen = config.get_text_config(decoder=True).dtype if dtype in (None, "auto") else dtype
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen or torch.float32


def _device_type(device_map: Any) -> str:
    """The type of the device that `from_pretrained` puts most of a model on."""
    if device_map is None:
        return torch.get_default_device().type
    first = next(iter(device_map.values()), "cpu") if isinstance(device_map, dict) else device_map
    if first in ("auto", "balanced", "balanced_low_0", "sequential") or isinstance(first, int):
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    return torch.device(first).type if first != "disk" else "cpu"


def _guarded(method: QuantizationConfigMixin, model: PreTrainedModel) -> QuantizationConfigMixin:
    """`method`, set to skip tied weights and layers whose shape its backend does not support. Warns once about the latter."""
    needs_out, needs_in, skips, transposes = 1, 1, "modules_to_not_convert", False
    if isinstance(method, BitsAndBytesConfig):
        skips, transposes = "llm_int8_skip_modules", True  # GPT-2's [in, out] weights are quantized too
        if method.load_in_4bit:
            needs_out, needs_in = FOUR_BIT_OUT, FOUR_BIT_IN
    elif isinstance(method, QuantoConfig):
        needs_in = QUANTO_INT8_IN if method.weights == "int8" else 1
    elif isinstance(method, TorchAoConfig):
        if type(method.quant_type).__name__.startswith("Int4") and not torch.accelerator.is_available():
            raise ValueError('quantization: torchao has no int4 for CPUs; use "nf4" or "int4"')
    else:
        return method  # other backends have no known restrictions

    # A list given here replaces transformers' own exclusions: the output embedding and tied weights.
    own = getattr(method, skips)
    tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
    skipped = {*get_keys_to_not_convert(model)} if own is None else {*own, *tied}
    shapes = {
        name: module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape  # (out, in)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D) if transposes else nn.Linear)
        and should_convert_module(name, [*skipped])
    }
    unfit = [name for name, (out, into) in shapes.items() if out % needs_out or into % needs_in]
    rule = f"out_features divisible by {needs_out} and in_features by {needs_in}"
    if len(unfit) == len(shapes):
        raise ValueError(
            f"quantization: none of the {len(shapes)} layers of {type(model).__name__} has the shape that this method needs "
            f'({rule}); use "int4" or "int8-torchao", or leave quantization out'
        )
    if unfit:
        warnings.warn(
            f"{len(unfit)} of {len(shapes)} layers stay unquantized: this quantization needs {rule}, "
            f"but {unfit[0]} has the shape {tuple(shapes[unfit[0]])}",
            stacklevel=3,
        )
    setattr(method, skips, sorted({*skipped, *unfit}))
    return method


def _settled(model: PreTrainedModel) -> PreTrainedModel:
    """Work around side effects of the backends on a model that was just loaded. Returns the model."""
    method = getattr(model.config, "quantization_config", None)
    if isinstance(method, QuantoConfig):
        # On a CPU, quanto would compile a C++ extension to unpack 4-bit weights; torch can do it in two operations.
        unpack_in_torch(_unpack)
    if isinstance(method, TorchAoConfig):
        for module in model.modules():
            module.__dict__.pop("extra_repr", None)  # used by print() only, and prevents pickling
    if isinstance(method, BitsAndBytesConfig) and method.load_in_8bit:
        model.register_forward_pre_hook(_silence)
        model.register_forward_hook(_unsilence, always_call=True)
    return model


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """packed: [rows, ...] uint8 -> [rows * 8 // bits, ...] uint8, the lowest bits of all bytes first."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def _is_news(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in str(record.msg)


def _silence(*_: Any) -> None:
    """bitsandbytes logs in every call of an int8 layer that it casts to float16."""
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)


def _unsilence(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").removeFilter(_is_news)


def _is_quantized(model: PreTrainedModel) -> bool:
    shells = any(is_wrapper_subclass(weight) for weight in model.parameters())
    return shells or getattr(model, "hf_quantizer", None) is not None


def _original(model: PreTrainedModel, source: str | PreTrainedModel) -> PreTrainedModel:
    """The unquantized original of a quantized model. The weights that are not quantized must be equal."""
    remedy = "pass source=, the path or the model that it was quantized from"
    if not source or getattr(model.config, "quantization_config", None) is None:
        raise ValueError(f"source: the original of this quantized model is unknown; {remedy}")
    if isinstance(source, PreTrainedModel):
        original = source
        if _is_quantized(original):
            raise ValueError("source: this model is quantized, too; pass the unquantized one")
    else:
        try:
            original = type(model).from_pretrained(source, dtype=model.dtype)
        except OSError as error:
            raise ValueError(f"source: there is no checkpoint of the original at {source!r}; {remedy}") from error
    theirs = dict(original.named_parameters())
    for name, weight in model.named_parameters():
        if type(weight) is nn.Parameter and not _equal(weight, theirs.get(name)):
            raise ValueError(f"source: its {name} differs from the model's; {remedy}")
    return original


def _copy_checkpoint(source: str, folder: Path) -> None:
    files = ("*.safetensors", "*.safetensors.index.json", "generation_config.json")
    origin = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=[*files]))
    folder.mkdir(parents=True, exist_ok=True)
    for file in (file for pattern in files for file in origin.glob(pattern)):
        shutil.copyfile(file, folder / file.name)


def _equal(weight: torch.Tensor, other: torch.Tensor | None) -> bool:
    return (
        other is not None
        and (weight.dtype, weight.shape) == (other.dtype, other.shape)
        and torch.equal(weight.cpu(), other.cpu())
    )
