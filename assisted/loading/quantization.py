"""Quantized drafts: named quantization configs, loading, saving, and memory use.

Knows backends by their entries (backends/); nothing of drafting. A quantized model is saved as its original weights: every
backend quantizes the same weights to the same bits, but few save quantized tensors reliably.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..engine.cross import Encoded, alone, is_encoder_decoder
from ..engine.libraries import COMPILED, QUANT_METHODS, attention_of, is_wrapper_subclass, storage_key
from ..engine.parts import few_ids, try_out, unwrapped
from .adapters import MADE_BY_PEFT, base_path, copy_adapter, has_adapter, restore_magnitudes, save_adapter, trusting
from .backends import BACKENDS, NAMES, Backend, find, names, placed, replacement
from .classes import auto_class
from .files import copy_files, of_hub
from .gguf import load_gguf, unmarked

__all__ = [
    "NAMES",
    "load_from_gguf",
    "load_quantized",
    "memory_bytes",
    "quantize_copy",
    "remedy",
    "require_runs",
    "resolve",
    "save_quantized",
    "save_target",
    "stored_bytes",
    "unpack",
    "with_recorded",
]

Quantization: TypeAlias = str | dict[str, Any] | QuantizationConfigMixin

RECORD = "assisted_quantization"  # the field of config.json where save_quantized records how to quantize again


def resolve(
    quantization: Quantization | None, dtype: torch.dtype, device: str = "cpu"
) -> QuantizationConfigMixin | None:
    """The transformers config for a name of a format; a config object or its dict is copied.

    "int8" and "int4" are the fastest weights of that size that a device has: on a CPU `PackedConfig`, which needs no further
    package; elsewhere "int8-bitsandbytes" (LLM.int8(), which also quantizes activations and casts them to float16), and
    "int4-tinygemm", which is `PackedConfig(4)` on an NVIDIA card, or "int4-quanto". "int4-int8" is "int4" with inputs of 8 bits
    where the kernels in C run. "nf4" and "fp4" are bitsandbytes' 4-bit formats, "int8-quanto" is optimum-quanto's and
    "int8-torchao" torchao's; these quantize weights only.

    dtype: that the model computes in. device: the type that it runs on; "any" for weights that need no device of a kind.

    Raises ValueError for unknown names and types, ImportError if the backend is missing.
    """
    if quantization is None:
        return None
    if isinstance(quantization, str):
        backend, chosen = find(placed(quantization, device))
        backend.require()
        return chosen.config(dtype)
    if isinstance(quantization, dict):
        if not quantization.keys() & {"quant_method", "load_in_4bit", "load_in_8bit"}:
            raise ValueError(f"quantization: {quantization!r} has no quant_method; use one of {', '.join(names())}")
        entry = _entry(quantization.get("quant_method", "bitsandbytes"))  # dicts with load_in_4bit may omit it
    elif isinstance(quantization, QuantizationConfigMixin):
        entry = _entry(quantization)
    else:
        raise ValueError(
            f"quantization: expected one of {', '.join(names())}, a transformers quantization config or its dict, "
            f"got {type(quantization).__name__}"
        )
    if entry is not None:
        entry.require()
    from_dict: Any = AutoQuantizationConfig.from_dict
    method = from_dict(quantization) if isinstance(quantization, dict) else copy.deepcopy(quantization)
    replaced = None if entry is None or device == "cpu" else entry.format_of(method)
    if replaced is None or not replaced.elsewhere:
        return method
    return resolve(replacement(replaced, device), dtype, device)


def load_quantized(
    path: str,
    quantization: Quantization | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """`auto_class(config).from_pretrained(path)`, quantized except for layers that the backend would compute incorrectly.

    If `path` is a PEFT adapter, its base model is quantized.

    quantization: None loads the checkpoint as it is or, if `save_quantized` wrote it, quantizes it as recorded there.
    dtype: of computation and of unquantized weights; None or "auto" takes the checkpoint's.
    device_map, kwargs: for `from_pretrained`. Raises ValueError if no layer can be quantized, if all are already, or if the
    checkpoint lacks tensors, which transformers would draw at random.
    """
    hub = of_hub(kwargs, "trust_remote_code")
    base = base_path(path, "draft", **hub)
    hub, kwargs = trusting(path, base, **hub), trusting(path, base, **kwargs)
    config = AutoConfig.from_pretrained(base, **hub)
    require_readable(config, path, "draft")
    if quantization is not None and getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"quantization: the model at {path!r} is quantized already; leave quantization out")
    if quantization is None:
        quantization = getattr(config, RECORD, None)
    device = _device_type(device_map) if base == path else "any"  # PEFT adapts no packed layers
    method = resolve(quantization, _computed_in(dtype, config), device)
    if method is not None:
        with torch.device("meta"):  # _guarded needs shapes only
            shapes = auto_class(config).from_config(config, trust_remote_code=kwargs.get("trust_remote_code"))
        kwargs["quantization_config"] = _guarded(method, shapes)
    kind = auto_class(config)
    model, found = kind.from_pretrained(path, dtype=dtype, device_map=device_map, output_loading_info=True, **kwargs)
    made = restore_magnitudes(model, path, "draft", **hub)
    if lacking := sorted(name for name in {*found["missing_keys"]} - made if not name.endswith(MADE_BY_PEFT)):
        names = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        raise ValueError(
            f"draft: the checkpoint at {path!r} lacks {names}, which would be random numbers; download it again, or check "
            "that its config.json belongs to these weights"
        )
    model.config.__dict__.pop(RECORD, None)
    return _settled(model)


def load_from_gguf(path: str, gguf_file: str, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
    """`load_gguf` of a target. With a `quantization_config` of another format, the dequantized weights are then quantized:
    transformers refuses such a config beside a GGUF file. path, gguf_file and the others: see `load_gguf`. Raises ValueError as
    that and `quantize_copy` do."""
    given = kwargs.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    if given is None or str(getattr(method, "value", method)) == "gguf":
        return load_gguf(path, gguf_file, "target", *model_args, **kwargs)
    return quantize_copy(
        load_gguf(path, gguf_file, "target", *model_args, **{**kwargs, "quantization_config": None}), given
    )


def quantize_copy(model: PreTrainedModel, quantization: Quantization) -> PreTrainedModel:
    """A quantized copy of a loaded model, on the same devices. Unquantized weights are shared, not copied.

    Raises ValueError if the model has an adapter, is already quantized, or has offloaded weights.
    """
    if has_adapter(model):
        raise ValueError("quantization: the model has an adapter; merge it (merge_and_unload()), or use another draft")
    model = unmarked(model)
    if _is_quantized(model):
        raise ValueError("quantization: the model is quantized already; quantize a copy of the original")
    if name := next((name for name, _ in model.named_parameters() if COMPILED in name.split(".")), None):
        raise ValueError(
            f"quantization: a part of the model is a result of torch.compile, and a copy finds no weights under its names "
            f"({name}); leave that out, or use another draft"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("quantization: part of the model is offloaded; load it into memory, or use another draft")
    method = resolve(quantization, model.dtype, model.device.type)
    if method is None:
        raise ValueError(f"quantization: None makes no quantized copy; use one of {', '.join(names())}")
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


def save_quantized(
    model: PreTrainedModel, folder: str | Path, source: str | PreTrainedModel | None = None, **kwargs: Any
) -> None:
    """Save a model such that `load_quantized(folder)` restores it bit for bit.

    The folder is an ordinary checkpoint of the original weights; config.json also records how to quantize them. An unquantized
    model is saved as it is. Of a model with a PEFT adapter, only the adapter is saved, with the path of its base model; the
    quantization must then be given again when loading.

    source: the path or the unquantized model that `model` was quantized from; None for the path it was loaded from. kwargs: of
    `save_pretrained` for original weights.

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
            copy_files(str(source), Path(folder), "*.safetensors", "*.safetensors.index.json", "generation_config.json")
        else:
            original.save_pretrained(folder, **kwargs)
    config = copy.deepcopy(original.config)
    config.architectures, config.dtype = [type(original).__name__], model.dtype
    if not _is_quantized(original):  # otherwise its config already holds the method
        setattr(config, RECORD, model.config.quantization_config.to_dict())
    config.save_pretrained(folder)


def save_target(model: PreTrainedModel, folder: Path, **kwargs: Any) -> None:
    """Save a target without an adapter such that `with_recorded` reads it back bit for bit. Weights that transformers cannot
    save quantized are saved as they were before, with a record of how to quantize them.

    model: the target. folder: of the target, in that of the pair. kwargs: of `save_pretrained`. Raises ValueError if such
    weights are not at the path that the target was loaded from.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.is_serializable():
        model.save_pretrained(folder, **kwargs)
        return
    try:
        save_quantized(model, folder, **kwargs)
    except ValueError as error:
        raise ValueError(
            "target: its quantized weights cannot be saved, and those that they were made from are not at "
            f"{model.name_or_path!r}; save the unquantized model, and quantize it whenever you load it"
        ) from error


def with_recorded(config: PretrainedConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a target's `from_pretrained`, with the quantization that `save_target` recorded in its config, if any. It
    is taken out of the config. One that is given remains.

    config: of the target. kwargs: for `from_pretrained`."""
    record = config.__dict__.pop(RECORD, None)
    if record is None or kwargs.get("quantization_config") is not None:
        return kwargs
    device = _device_type(kwargs.get("device_map"))
    return {**kwargs, "quantization_config": resolve(record, _computed_in(kwargs.get("dtype"), config), device)}


@torch.no_grad()
def require_runs(model: PreTrainedModel, quantization: Any) -> None:
    """Reject a quantized draft that cannot run: some models use products that a backend's weights do not support.

    quantization: as the caller gave it, for the message. Raises ValueError.
    """
    try:
        ids = few_ids(model)
        if is_encoder_decoder(model):
            alone(model, Encoded.trial(model, 1), [0], ids, None)
        else:
            model(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = quantization if isinstance(quantization, str) else type(quantization).__name__
        raise ValueError(
            f"draft_quantization: {type(model).__name__} does not run in {name} ({type(error).__name__}: "
            f"{str(error)[:200]}); choose another of {', '.join(names())}, or another draft"
        ) from error


def unpack(model: PreTrainedModel) -> None:
    """Let compressed-tensors unpack a model's weights, which a hook does in the first forward pass. After a trial, which
    restores all attributes, half of that would be missing."""
    if hasattr(unwrapped(model), "ct_decompress_hook"):
        try_out(unwrapped(model))


def remedy(config: PretrainedConfig, kwargs: dict[str, Any]) -> str:
    """What to try if `from_pretrained` of a quantized checkpoint raises an error; "" if nothing is known.

    config: the checkpoint's. kwargs: of `from_pretrained`."""
    method = getattr(config, "quantization_config", None)
    method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
    if str(getattr(method, "value", method)) != "compressed-tensors" or kwargs.get("quantization_config") is not None:
        return ""
    return (
        ". compressed-tensors 0.20 does not read asymmetric 4-bit weights or a packed head that is tied to the embedding; "
        "quantization_config=CompressedTensorsConfig(dequantize=True) unpacks the weights while they are loaded"
    )


def require_readable(config: PretrainedConfig, path: str, role: str) -> None:
    """Raise ValueError for a checkpoint that is quantized for MLX, or by a method that transformers does not know. It would
    read such weights (5.23: with a line in the log) as ordinary numbers, without their scales.

    config: the checkpoint's. A method of a repository's own code is left to that. path, role: for the message."""
    method = getattr(config, "quantization_config", None)
    if isinstance(method, dict) and "quant_method" not in method and {"bits", "group_size"} <= method.keys():
        raise ValueError(
            f"{role}: {path!r} is quantized for MLX, which transformers does not read; use the original or another "
            "quantization of it, or unpack this one (mlx_lm.convert --dequantize)"
        )
    name = method.get("quant_method") if isinstance(method, dict) else None
    if isinstance(name, str) and name not in QUANT_METHODS and not hasattr(config, "auto_map"):
        raise ValueError(
            f"{role}: {path!r} is quantized by {name!r}, which this version of transformers does not know, so that it would "
            "read the weights without their scales; use the original or another quantization of it"
        )


def require_whole_head(model: PreTrainedModel) -> None:
    """Raise ValueError for a target whose output head has bitsandbytes' module, but an embedding's ordinary weight.

    transformers makes one if `llm_int8_skip_modules` is given without the head, and every forward pass of it fails."""
    model = unwrapped(model)
    head = model.get_output_embeddings()
    if type(head).__module__.startswith("bitsandbytes.") and type(head.weight) is nn.Parameter:
        name = next(name for name, module in model.named_modules() if module is head)
        raise ValueError(
            f"quantization_config: {name!r} shares its weight with the embedding, which bitsandbytes does not quantize; add "
            f"{name!r} to llm_int8_skip_modules, which replaces the default list"
        )


def stored_bytes(model: PreTrainedModel, quantization: str | None, dtype: torch.dtype, copy: bool = False) -> int:
    """The bytes that the weights of a model take once they are loaded, from its shapes; it may be on the meta device.

    quantization: a format's name, or None. dtype: of weights that are not quantized. copy: count only what a quantized copy
    does not share with its original. Raises ValueError for an unknown name and if no layer can be quantized.
    """
    shared = sum({id(weight): weight.numel() for weight in model.parameters()}.values()) * dtype.itemsize
    if quantization is None:
        return 0 if copy else shared
    backend, chosen = find(quantization)
    tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
    head = model.get_output_embeddings()
    skipped = [] if backend.skips is None else [*get_keys_to_not_convert(model)]
    replaced = made = 0
    for name, (module, out, into) in _quantizable(model, backend, skipped).items():
        if out % chosen.multiples[0] or into % chosen.multiples[1]:
            continue
        if module is head and chosen.head is None:
            continue
        stored = backend.formats[chosen.head] if chosen.head and module is head else chosen
        made += stored.bytes(out, into, dtype.itemsize)
        replaced += 0 if name in tied else out * into * dtype.itemsize  # an embedding stays beside its quantized head
    if not made:
        raise ValueError(
            f"quantization: no layer of {type(model).__name__} has a shape that {quantization!r} can quantize"
        )
    return made if copy else shared - replaced + made


def _quantizable(model: nn.Module, backend: Backend, skipped: Sequence[str]) -> dict[str, tuple[nn.Module, int, int]]:
    """The modules that a backend would quantize, with out_features and in_features, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, backend.modules) and should_convert_module(name, [*skipped]):
            shape: Any = module.weight.shape
            found[name] = (module, *(shape[::-1] if isinstance(module, Conv1D) else shape))
    return found


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


def _entry(method: Any) -> Backend | None:
    """The backend of a config or of its quant_method; None for one that this package knows nothing of."""
    method = getattr(method, "quant_method", method)
    return BACKENDS.get(str(getattr(method, "value", method)))


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
    backend = _entry(method)
    if backend is None or backend.skips is None:
        return method
    chosen = backend.format_of(method)
    needs_out, needs_in = (1, 1) if chosen is None else chosen.multiples
    # A list given here replaces transformers' own exclusions: the output embedding and tied weights.
    own = getattr(method, backend.skips)
    tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
    skipped = {*get_keys_to_not_convert(model)} if own is None else {*own, *tied}
    shapes = {name: shape for name, (_, *shape) in _quantizable(model, backend, [*skipped]).items()}
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
    setattr(method, backend.skips, sorted({*skipped, *unfit}))
    return method


def _settled(model: PreTrainedModel) -> PreTrainedModel:
    """A model that was just loaded, with the side effects of its backend worked around."""
    backend = _entry(getattr(model.config, "quantization_config", None))
    if backend is not None:
        backend.settle(model)
    return model


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
        if type(weight) is not nn.Parameter:
            continue
        other = theirs.get(name)
        if other is None or weight.dtype != other.dtype or not torch.equal(weight.cpu(), other.cpu()):
            raise ValueError(f"source: its {name} differs from the model's; {remedy}")
    return original
