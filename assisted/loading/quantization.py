"""Quantized drafts: names to transformers' quantization configs, the guards the backends need, true memory.

Knows what each backend computes wrongly, and nothing of drafting. A model is saved as the weights it was quantized from:
every backend here turns the same weights into the same bits, while each has its own way of losing the quantized tensors.
"""

from __future__ import annotations

import copy
import importlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
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

from ..engine.parts import few_ids, unwrapped
from .adapters import base_path, copy_adapter, has_adapter, save_adapter, trusting
from .gguf import unmarked

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
]

Quantization: TypeAlias = str | dict[str, Any] | QuantizationConfigMixin

BACKENDS = {"bitsandbytes": "bitsandbytes", "quanto": "optimum.quanto", "torchao": "torchao"}
RECORD = "assisted_quantization"  # in config.json of what save_quantized wrote: how to quantize these weights again
HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")

# What the CPU kernels need; elsewhere they raise, or worse. Applied on every device, so that a draft is the same everywhere.
FOUR_BIT_OUT, FOUR_BIT_IN = 32, 64  # bitsandbytes packs 32 rows together and scales blocks of 64 along a row
QUANTO_INT8_IN = 16  # other widths crash the process in bfloat16

_SCALED_BY_PASS = ("torch.ao.nn.quantized.dynamic.", "torch.nn.quantized.dynamic.")


def _four_bit(kind: str) -> Callable[[torch.dtype], QuantizationConfigMixin]:
    # Computing in the model's own dtype: another would be cast to and from at every layer.
    return lambda dtype: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)


def _torchao_int8(dtype: torch.dtype) -> QuantizationConfigMixin:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# A name means the same on every machine, or a saved pair would not.
_CONFIGS: dict[str, tuple[str, Callable[[torch.dtype], QuantizationConfigMixin]]] = {
    "nf4": ("bitsandbytes", _four_bit("nf4")),
    "fp4": ("bitsandbytes", _four_bit("fp4")),
    "int8": ("bitsandbytes", lambda dtype: BitsAndBytesConfig(load_in_8bit=True)),
    "int4": ("quanto", lambda dtype: QuantoConfig(weights="int4")),
    "int8-quanto": ("quanto", lambda dtype: QuantoConfig(weights="int8")),
    "int8-torchao": ("torchao", _torchao_int8),
}
NAMES: tuple[str, ...] = tuple(_CONFIGS)


def resolve(quantization: Quantization | None, dtype: torch.dtype) -> QuantizationConfigMixin | None:
    """The transformers config behind a name of `NAMES`; a config object or its dict is returned as an object of its own.

    "nf4" and "fp4" are bitsandbytes' 4-bit formats, "int8" its LLM.int8(): activations are rounded too, and through float16.
    "int4" and "int8-quanto" are optimum-quanto's, "int8-torchao" is torchao's: weights only, and on CPUs the int8 to take,
    nearer to the original than "int8" and at home in every shape.

    dtype: what the model computes in. Raises ValueError for what is unknown, ImportError where the backend is missing.
    """
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
            raise ValueError(f"quantization: {quantization!r} names no quant_method; use one of {', '.join(NAMES)}")
        _require(quantization.get("quant_method", "bitsandbytes"))  # left out by the dicts that say load_in_4bit
        return AutoQuantizationConfig.from_dict(quantization)
    if not isinstance(quantization, QuantizationConfigMixin):
        raise ValueError(
            f"quantization: one of {', '.join(NAMES)}, a transformers quantization config or its dict is expected, "
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
    """`AutoModelForCausalLM.from_pretrained(path)`, quantized, without the layers that the backend would compute wrongly. Of a
    PEFT adapter with its base model, the base model is quantized.

    quantization: None loads what lies there: plainly, or as `save_quantized` recorded it.
    dtype: of all that stays unquantized, and what is computed in; None or "auto": the checkpoint's.
    device_map, kwargs: for `from_pretrained`. Raises ValueError where nothing can be quantized, or everything is already.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    base = base_path(path, "draft", **hub)
    hub, kwargs = trusting(path, base, **hub), trusting(path, base, **kwargs)
    config = AutoConfig.from_pretrained(base, **hub)
    if quantization is not None and getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"quantization: the model at {path!r} is quantized already; leave quantization out")
    if quantization is None:
        quantization = getattr(config, RECORD, None)
    method = resolve(quantization, _computed_in(dtype, config))
    if method is not None:
        with torch.device("meta"):  # the shapes are all the guards look at
            shapes = AutoModelForCausalLM.from_config(config, trust_remote_code=kwargs.get("trust_remote_code"))
        kwargs["quantization_config"] = _guarded(method, shapes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map, **kwargs)
    model.config.__dict__.pop(RECORD, None)
    return _settled(model)


def quantize_copy(model: PreTrainedModel, quantization: Quantization) -> PreTrainedModel:
    """A quantized copy of a model in memory, on the same devices. What stays unquantized is shared, not copied.

    Raises ValueError for a model that is quantized already, or whose weights are not all in memory.
    """
    if has_adapter(model):
        raise ValueError(
            "quantization: the model has an adapter; merge it (merge_and_unload()), or draft in another way"
        )
    model = unmarked(model)
    if _is_quantized(model):
        raise ValueError("quantization: the model is quantized already; quantize a copy of the original")
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("quantization: a part of the model is offloaded; load it whole, or draft with another model")
    method = resolve(quantization, model.dtype)
    if method is None:
        raise ValueError(f"quantization: None makes no quantized copy; use one of {', '.join(NAMES)}")
    # In memory rather than through a folder: save_pretrained writes into the config of the model it saves.
    copied: PreTrainedModel = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=model.state_dict(),
        dtype=model.dtype,
        device_map=getattr(model, "hf_device_map", None) or {"": model.device},
        attn_implementation=model.config._attn_implementation,
        quantization_config=_guarded(method, model),
    )
    copied.generation_config = copy.deepcopy(model.generation_config)
    copied.name_or_path = copied.config.name_or_path = ""  # no path holds these weights
    return _settled(copied)


def save_quantized(model: PreTrainedModel, folder: str | Path, source: str | PreTrainedModel | None = None) -> None:
    """Write a draft so that `load_quantized(folder)` gives the same model, to the bit: its tokens are the same.

    The folder holds the weights the draft was quantized from, and in config.json how to quantize them: an ordinary
    checkpoint for everyone else. A model that is not quantized is saved as it is. Of one with a PEFT adapter the adapter is
    saved, which names its base model; whoever loads it says again how that is quantized.

    source: the path or the unquantized model that `model` was made from; None: the path it was loaded from.
    """
    if has_adapter(model):
        if not _is_quantized(unwrapped(model)):
            save_adapter(model, folder, "draft")
        elif isinstance(source, str):
            copy_adapter(source, folder)
        else:
            raise ValueError(
                "draft: a quantized model with an adapter cannot be saved; name both by the adapter's path"
            )
        return
    model = unmarked(model)
    if not _is_quantized(model):
        model.save_pretrained(folder)
        return
    source = model.name_or_path if source is None else source
    original = _original(model, source)
    if isinstance(source, PreTrainedModel) or Path(source).resolve() != Path(folder).resolve():
        if _is_quantized(original):  # the checkpoint was quantized before anyone loaded it: transformers cannot save it
            _copy_checkpoint(str(source), Path(folder))
        else:
            original.save_pretrained(folder)
    config = copy.deepcopy(original.config)
    config.architectures, config.dtype = [type(original).__name__], model.dtype
    if not _is_quantized(original):  # else its config says it
        setattr(config, RECORD, model.config.quantization_config.to_dict())
    config.save_pretrained(folder)


@torch.no_grad()
def require_runs(model: PreTrainedModel, quantization: Any) -> None:
    """Refuse a quantized draft that cannot run: some models multiply in a way that a backend's weights don't know.

    quantization: as the caller wrote it, for the message. Raises ValueError.
    """
    try:
        model(input_ids=few_ids(model), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = quantization if isinstance(quantization, str) else type(quantization).__name__
        raise ValueError(
            f"draft_quantization: {type(model).__name__} does not run in {name} ({type(error).__name__}: "
            f"{str(error)[:200]}); choose another one of {', '.join(NAMES)}, or another draft"
        ) from error


def rounds_by_pass(model: nn.Module) -> str | None:
    """Why what a model computes for one token depends on the other tokens of its pass; None where it does not.

    Dynamic quantization that scales the activations of a whole pass by their largest one: torch's own, and torchao's with
    `PerTensor`. Scales per token do not depend on the pass.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_SCALED_BY_PASS):
            return f"{name} quantizes its inputs by the largest number of a pass"
        activations = getattr(module._parameters.get("weight"), "act_quant_kwargs", None)
        if type(getattr(activations, "granularity", None)).__name__ == "PerTensor":
            return f"{name} quantizes its inputs with one scale for a whole pass"
    return None


def copy_shells(memo: dict[int, Any], *models: nn.Module) -> None:
    """Let `copy.deepcopy`, called with this memo, find copies of the weights that it cannot copy: those of quanto."""
    for model in models:
        for weight in model.parameters():
            if type(weight).__module__.startswith("optimum.quanto"):
                memo.setdefault(id(weight), nn.Parameter(_shell(weight, memo), requires_grad=weight.requires_grad))


def _shell(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy of a tensor that may be a shell around others."""
    if not is_traceable_wrapper_subclass(tensor):
        return copy.deepcopy(tensor, memo)
    names, how = tensor.__tensor_flatten__()
    inner = {name: _shell(getattr(tensor, name), memo) for name in names}
    return type(tensor).__tensor_unflatten__(inner, how, tensor.size(), tensor.stride())


def memory_bytes(*models: nn.Module, buffers: bool = True) -> int:
    """Bytes that the weights, buffers and quantization state of models take as they are stored; what is shared, within a model
    or between them, counts once.

    buffers: whether buffers count, too.
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
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in found}.values())


def _storages(owner: Any) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor, or behind the object a backend keeps its scales in."""
    if isinstance(owner, torch.Tensor) and is_traceable_wrapper_subclass(owner):
        for name in owner.__tensor_flatten__()[0]:  # quanto, torchao: a shell around the tensors that hold the data
            yield from _storages(getattr(owner, name))
        return
    if isinstance(owner, torch.Tensor):
        yield owner.untyped_storage()
    if type(owner).__module__.startswith("bitsandbytes"):  # its weights, QuantState, MatmulLtState
        for value in vars(owner).values():
            yield from _storages(value)


def _require(method: Any) -> None:
    """Import the backend of a quantization method, or say how to install it. Methods of other backends are not ours."""
    backend = BACKENDS.get(str(getattr(method, "value", method)))
    if backend is None:
        return
    try:
        importlib.import_module(backend)
    except ImportError as error:
        raise ImportError(f'quantization: this needs {backend}: pip install "assisted[quant]"') from error


def _computed_in(dtype: torch.dtype | str | None, config: PretrainedConfig) -> torch.dtype:
    chosen = config.get_text_config(decoder=True).dtype if dtype in (None, "auto") else dtype
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen or torch.float32


def _guarded(method: QuantizationConfigMixin, model: PreTrainedModel) -> QuantizationConfigMixin:
    """`method`, leaving out tied weights and the layers whose shape its backend cannot compute. One warning for all."""
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
        return method  # another backend's own business

    # A list replaces transformers' own exclusions, which keep the head and what is tied to the embeddings.
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
            f"quantization: none of the {len(shapes)} layers of {type(model).__name__} has the shape this method needs "
            f'({rule}); use "int4" or "int8-torchao", or leave quantization out'
        )
    if unfit:
        warnings.warn(
            f"{len(unfit)} of {len(shapes)} layers stay unquantized: this quantization needs {rule}, "
            f"and {unfit[0]} has {tuple(shapes[unfit[0]])}",
            stacklevel=3,
        )
    setattr(method, skips, sorted({*skipped, *unfit}))
    return method


def _settled(model: PreTrainedModel) -> PreTrainedModel:
    """Keep the backend of a model that was just loaded from doing at its first forward what users should not meet."""
    method = getattr(model.config, "quantization_config", None)
    if isinstance(method, QuantoConfig):
        # Unpacking 4 bits on a CPU would start a C++ compiler, for two operations that torch has.
        from optimum.quanto.library.extensions import get_extension, is_extension_available

        if is_extension_available("quanto_cpp") and get_extension("quanto_cpp")._lib is None:
            get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=_unpack)
    if isinstance(method, TorchAoConfig):
        for module in model.modules():
            module.__dict__.pop("extra_repr", None)  # for print() alone, and in a form that cannot be pickled
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
    """bitsandbytes says once per int8 layer and call that it casts to float16, as it always does."""
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)


def _unsilence(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").removeFilter(_is_news)


def _is_quantized(model: PreTrainedModel) -> bool:
    shells = any(is_traceable_wrapper_subclass(weight) for weight in model.parameters())
    return shells or getattr(model, "hf_quantizer", None) is not None


def _original(model: PreTrainedModel, source: str | PreTrainedModel) -> PreTrainedModel:
    """The unquantized weights of a quantized model, verified by the weights that quantization leaves alone."""
    remedy = "pass source=, the path or the unquantized model it was made from"
    if not source or getattr(model.config, "quantization_config", None) is None:
        raise ValueError(f"source: nothing says what this quantized model was made from; {remedy}")
    if isinstance(source, PreTrainedModel):
        original = source
        if _is_quantized(original):
            raise ValueError("source: this model is quantized too; pass the one before quantization")
    else:
        try:
            original = type(model).from_pretrained(source, dtype=model.dtype)
        except OSError as error:
            raise ValueError(f"source: no checkpoint of the original at {source!r}; {remedy}") from error
    theirs = dict(original.named_parameters())
    for name, weight in model.named_parameters():
        if type(weight) is nn.Parameter and not _equal(weight, theirs.get(name)):
            raise ValueError(f"source: its {name} is not the model's; {remedy}")
    return original


def _copy_checkpoint(source: str, folder: Path) -> None:
    files = ("*.safetensors", "*.safetensors.index.json", "generation_config.json")
    lies = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=[*files]))
    folder.mkdir(parents=True, exist_ok=True)
    for file in (file for pattern in files for file in lies.glob(pattern)):
        shutil.copyfile(file, folder / file.name)


def _equal(weight: torch.Tensor, other: torch.Tensor | None) -> bool:
    return (
        other is not None
        and (weight.dtype, weight.shape) == (other.dtype, other.shape)
        and torch.equal(weight.cpu(), other.cpu())
    )
