"""What this package uses of transformers, torch, accelerate and quanto that is private, or not in every supported version.

No other file does, so this one shows what another version can break. A missing name costs what is written beside it, and never
an ImportError: `lost` lists these costs, and `assisted doctor` prints them. Two kinds of private names are used elsewhere, too:
the dictionaries of nn.Module (`_modules`, `_parameters`, `_forward_hooks` and so on), which are the same in every version and
which functions would only hide, and names that a class of this package inherits.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

_LOST: dict[str, str] = {}


def lost() -> dict[str, str]:
    """The names that the installed versions lack, with what each costs; empty if they have all."""
    return dict(_LOST)


def _found(home: str, name: str, cost: str, instead: Any = None) -> Any:
    """The attribute `name`, possibly dotted, of the module `home`; `instead`, and a line in `lost`, if there is none."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(home))
    except (ImportError, AttributeError):
        _LOST[f"{home}.{name}"] = cost
        return instead


# ---- The layers of transformers' caches


def _layer(name: str, cost: str) -> Any:
    """A class of layers; if this version has none, a class without instances."""
    return _found("transformers.cache_utils", name, cost, type(name, (), {}))


_RECURRENT = "targets with recurrent states are refused"
# from 5.23 and from 5.13 on
DummyLayer = _layer("DummyLayer", "nothing, since layers without a cache have another class in this version")
LinearAttentionAndSlidingWindowAttentionLayer = _layer(
    "LinearAttentionAndSlidingWindowAttentionLayer", "targets with recurrent states and sliding windows are refused"
)
# From 5.14 on; an earlier table has another name and other entries.
_KINDS: dict[str, type] = _found("transformers.cache_utils", "DYNAMIC_LAYER_TYPE_MAPPING", _RECURRENT, {})
_NUMBERED = "number_of_states" in inspect.signature(LinearAttentionLayer).parameters
"""Whether a layer holds its states in dictionaries, by number."""
STATE_LAYERS = frozenset(
    k for k, kind in _KINDS.items() if _NUMBERED and issubclass(kind, LinearAttentionCacheLayerMixin)
)
"""The entries of a config's `layer_types` that stand for layers with states."""
READS_STATES = (
    _found("transformers.cache_utils", "Cache.get_conv_state", "prompts of hybrids are not read in C") is not None
)
"""Whether a cache hands out its states. From 5.21 on."""


class UnboundedLayer(CacheLayerMixin):
    """A layer of a cache that may grow without a limit."""

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name until 5.12, and abstract there


def has_default_cache(model: Any) -> bool:
    """Whether `generate` makes a DynamicCache for a model. Where this cannot be asked, the layers of that cache decide."""
    return bool(getattr(model, "_supports_default_dynamic_cache", lambda: True)())


def is_stateful(model: Any) -> bool:
    """Whether a model keeps a recurrent state in a cache of its own kind."""
    return bool(getattr(model, "_is_stateful", False))


# ---- transformers' `generate`

_sample = _found("transformers", "GenerationMixin._sample", "foreign code between forward passes may not be noticed")
_prefill = _found("transformers", "GenerationMixin._prefill", "every call runs without drafts")
LOOP: tuple[FunctionType, ...] = tuple(function for function in (_sample, _prefill) if function is not None)
"""The functions with `generate`'s loop over tokens."""
LOOP_METHOD = "_sample"
_INPUTS = _found("transformers", "GenerationMixin.prepare_inputs_for_generation", "nothing", lambda past_key_values: {})
CACHE = "cache" if "cache" in inspect.signature(_INPUTS).parameters else "past_key_values"
"""The argument and output of transformers' models that holds the cache: `cache` from 5.24 on."""
CACHE_NAMES = tuple(dict.fromkeys((CACHE, "past_key_values", "cache_params")))
"""All its names, those of older code included."""
_prepares = _found(
    "transformers", "GenerationMixin._prepare_cache_for_generation", "`generate` fills every cache it made"
)
_MARKS = _prepares is not None and "_is_user_defined" in _prepares.__code__.co_names


def cannot_draft() -> str | None:
    """Why no call can draft in this version of transformers; None if calls can."""
    return None if _prefill is not None else "this version of transformers has no GenerationMixin._prefill"


def prefill(kind: Any, model: Any, ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The output of a model over a prompt, [B, n] int64, which is read as a model of this class reads it in `generate` (in
    chunks, if so configured)."""
    return kind._prefill(model, ids, generation_config, model_kwargs)


def with_prompt_of(length: int, config: Any) -> Any:
    """A copy of a call's settings for another prompt. `prefill` cuts off what the cache holds from a prompt of this length; a
    shorter one consists of new tokens alone."""
    config = copy.copy(config)
    config._mask_length = length
    return config


def with_cache_renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` in which `past_key_values` has this version's name."""
    return {CACHE if name == "past_key_values" else name: value for name, value in kwargs.items()}


def forget_prepared(model: Any) -> None:
    """Forget the static cache that a call of `generate` has prepared and nobody has filled.

    Before 5.14 it stays on the model, and the next call fails while it looks at it.
    """
    if not _MARKS:
        vars(model).pop("_cache", None)


def optimized_for_decode(model: Any) -> AbstractContextManager[Any]:
    """The context in which `generate` runs forward passes over single tokens, where mixtures of experts have other kernels."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


def pad_token(generation_config: Any) -> int | None:
    """The token with which `generate` fills rows that have ended."""
    pad = getattr(generation_config, "_pad_token_tensor", generation_config.pad_token_id)
    return None if pad is None else int(pad)


def is_of_caller(cache: Any) -> bool:
    """Whether a caller may have passed this cache to `generate`. Versions before 5.17 mark none, so any may be a caller's."""
    return bool(getattr(cache, "_is_user_defined", not _MARKS))


def processors(*names: str) -> frozenset[type]:
    """Logits processors of transformers by name, those that this version has."""
    home = importlib.import_module("transformers.generation.logits_process")
    return frozenset(getattr(home, name) for name in names if hasattr(home, name))


# ---- transformers' models and configs

CONFIG_ORIGIN = "_name_or_path"
"""The field of a config that holds where it was read from."""
CONFIG_FIELDS = frozenset({"_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions"})
"""Fields of every config that decide how its model runs."""
MODEL_METHODS = frozenset(
    {
        *("_auto_class", "_finalize_model_loading", "_from_config", "_get_files_timestamps"),
        *("_load_and_finalize_distributed_pretrained_model", "_load_pretrained_model", "_upload_modified_files"),
    }
)
"""Methods of PreTrainedModel for loading and saving."""
NOT_IN_FORWARD = frozenset({"_init_weights", "from_pretrained", "push_to_hub", "save_pretrained"})
"""Methods of models that no forward pass runs. Some libraries replace them to add a format of their own."""


_updates = _found(
    "transformers.modeling_rope_utils", "dynamic_rope_update", "models with dynamic angles are not drafted for"
)
RESETS_ANGLES = _updates is not None and inspect.getsource(_updates).count("{layer_type}_max_seq_len_cached") < 2
"""Whether dynamic rotary angles depend on the present text alone. Until 5.12, the length of the longest text so far is stored
under a wrong name, and the angles are never reset."""


def rotary_angles(rotary: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, **kind: Any) -> Any:
    """What a model's rotary embedding makes of positions of text. hidden: gives dtype and device. position_ids: [B, T] int64.

    Until 5.18, those with angles for pictures take one row of positions for each of their three axes."""
    if hasattr(rotary, "mrope_section") and position_ids.dim() == 2:
        position_ids = position_ids.expand(3, *position_ids.shape)
    return rotary(hidden, position_ids=position_ids, **kind)


def attention_of(config: Any) -> str | None:
    """The name of the attention implementation that a model with this config runs."""
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str) -> None:
    """Let a model with this config run another attention implementation."""
    config._attn_implementation = name


def chooses_experts(model: Any) -> bool:
    """Whether `set_experts_implementation` works for a model."""
    return bool(getattr(model, "_can_set_experts_implementation", lambda: False)())


def compile_anywhere(config: Any) -> None:
    """Let `generate` compile on a CPU, too. config: a CompileConfig."""
    config._compile_all_devices = True


def add_settings(parser: Any, kind: type) -> None:
    """Add the fields of a dataclass to an HfArgumentParser that has arguments already."""
    parser._add_dataclass_arguments(kind)
    parser.dataclass_types.append(kind)


# ---- GGUF files

# From 5.17 on. Until then, every model of a GGUF file was dequantized.
GgufConfig = _found(
    "transformers", "GgufConfig", "weights of GGUF files cannot stay packed", type("GgufConfig", (), {})
)


def dequantized() -> dict[str, Any]:
    """Arguments of `from_pretrained` for a GGUF file's weights without quantization."""
    return {} if "transformers.GgufConfig" in _LOST else {"quantization_config": GgufConfig(dequantize=True)}


def gguf_tensors(file: str) -> int:
    """The number of tensors in a GGUF file."""
    try:
        read = importlib.import_module("transformers.integrations.gguf").read_gguf_metadata
    except (ImportError, AttributeError):
        return len(importlib.import_module("gguf").GGUFReader(file).tensors)
    return len(read(file)[1])


def gguf_kinds() -> tuple[dict[int, tuple[int, int]], dict[int, Any]]:
    """What transformers' own reader of GGUF files, from 5.17 on, has by ggml's number of a quantized type: the numbers and the
    bytes of a block, and the function that expands blocks. Empty before."""
    home, cost = (
        "transformers.integrations.gguf.dequant",
        "nothing, if this version reads GGUF files with the package gguf",
    )
    return _found(home, "GGML_BLOCK", cost, {}), _found(home, "_DEQUANT", cost, {})


def gguf_splits() -> Mapping[str, str]:
    """Regular expressions for splitting text, by their names in GGUF; from 5.18 on, and empty before."""
    home, name = "transformers.integrations.gguf.gguf_tokenizer_mapping", "GGUF_PRE_TOKENIZER_SPLITS"
    return _found(home, name, "GGUF files cannot be written for llama.cpp", {})


# ---- Hooks of accelerate and torch


def hook_of(module: nn.Module) -> Any:
    """accelerate's hook on a module, which runs around its forward; None without one."""
    return module.__dict__.get("_hf_hook")


def source_of(module: nn.Module) -> Any:
    """The forward of a module that was replaced by accelerate's or by a compiled one; its own or somebody's otherwise."""
    values = module.__dict__
    forward = values["forward"] if hook_of(module) is None else values.get("_old_forward")
    return getattr(forward, "_torchdynamo_orig_callable", forward)


COMPILED = "_orig_mod"
"""What a result of `torch.compile` calls the module in it."""
QUANT_METHODS = frozenset(re.sub("_[48]bit$", "", name) for name in AUTO_QUANTIZATION_CONFIG_MAPPING)
"""The quantizations that this version of transformers knows, as checkpoints name them."""


def uncompiled(model: Any) -> Any:
    """The model inside `torch.compile(model)`; the model itself if it is not compiled."""
    return getattr(model, COMPILED, model)


def compiled_part(model: nn.Module) -> str | None:
    """The name of the first part of a model that is compiled, in place or by `torch.compile(part)`; None if none is. The name
    of the model itself is empty."""
    named = model.named_modules()
    return next((n for n, one in named if COMPILED in one._modules or one._compiled_call_impl is not None), None)


def global_hooks() -> list[Any]:
    """The hooks that run around the forward of every module."""
    tables = (getattr(nn.modules.module, f"_global_forward_{kind}", {}) for kind in ("hooks", "pre_hooks"))
    return [hook for table in tables for hook in table.values()]


def active_modes() -> list[str]:
    """The names of modes around this call that see every operation, except torch's default device, which changes no result.

    A version that cannot be asked counts as one with a mode: only `generate` itself is then right in every case.
    """
    try:
        if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
            return []
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    except (AttributeError, ImportError):
        return ["a mode that this version of torch does not name"]
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return [type(mode).__name__ for mode in modes if type(mode) is not DeviceContext]


# ---- torch's tensors, and operators that see them

DispatchMode = TorchDispatchMode
is_wrapper_subclass = is_traceable_wrapper_subclass
"""Whether a tensor is one of torchao's or quanto's, which hold others."""
HOST_READS = frozenset(
    {
        *("_local_scalar_dense", "_unique", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
        *("nonzero_numpy", "unique_consecutive", "unique_dim"),
    }
)
"""Operators with which the host reads values from a device."""
HOST_COPIES = frozenset({"_to_copy", "copy_", "to"})
"""Operators that may copy values between host and device."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number of a storage, the same for the same memory. Storages on the meta device all have the address 0."""
    return storage.data_ptr() or getattr(storage, "_cdata", id(storage))


# ---- Products with weights in few bits, or packed


def _eight_bits(given: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(given, packed.to(given.dtype)) * scales


def _no_four_bits(*args: Any) -> torch.Tensor:
    raise ValueError("quantization: this version of torch has no products with 4-bit weights on a CPU; use 'int8'")


int8_product = _found("torch", "_weight_int8pack_mm", "products with 8-bit weights are slow", _eight_bits)
_FOUR = "4-bit weights of this package are refused"
pack_four_bits = _found("torch", "_convert_weight_to_int4pack_for_cpu", _FOUR, _no_four_bits)
four_bit_product = _found("torch", "ops.aten._weight_int4pack_mm_for_cpu", _FOUR, _no_four_bits)
_tinygemm = _found("torch", "ops.aten._weight_int4pack_mm", "4-bit weights on a card are quanto's")
_pack_for_tinygemm = _found("torch", "ops.aten._convert_weight_to_int4pack", "4-bit weights on a card are quanto's")


def lacks_tinygemm() -> str | None:
    """Why torch's product with 4-bit weights does not run on this machine's card; None if it does, or if there is no card."""
    if _tinygemm is None or _pack_for_tinygemm is None:
        return "this version of torch has none"
    if torch.version.hip is not None:
        return "on AMD cards it was not tried"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "it needs an NVIDIA card of compute capability 8.0 (RTX 30, A100) or newer"
    return None


def pack_for_tinygemm(levels: torch.Tensor) -> torch.Tensor:
    """Steps 0 to 15, [out, in] int32 on a card, out a multiple of 8 and in of 32, in the layout of `tinygemm`."""
    tiles = next(tiles for tiles in (8, 4, 2) if levels.shape[1] % (16 * tiles) == 0)
    return _pack_for_tinygemm((levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8), tiles)


def tinygemm(given: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    """[n, in] bfloat16 -> [n, out] bfloat16. group: of inputs that share a scale and a zero point. scales: both,
    [groups, out, 2] bfloat16. Raises RuntimeError on another device."""
    if not packed.is_cuda:
        raise RuntimeError(
            f"these 4-bit weights are packed for a GPU and cannot run on {packed.device}; load the model there"
        )
    return _tinygemm(given.contiguous(), packed, group, scales)


_ONEDNN = "products on a CPU are not packed, which makes forward passes slower"
pack_for_onednn = _found("torch", "ops.mkldnn._reorder_linear_weight", _ONEDNN)
_pointwise = _found("torch", "ops.mkldnn._linear_pointwise.default", _ONEDNN)


def packs_for_onednn() -> bool:
    """Whether products with weights in oneDNN's layout work here."""
    return torch.backends.mkldnn.is_available() and pack_for_onednn is not None and _pointwise is not None


def packed_product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in], a weight [out, in] in oneDNN's layout, [out] or None -> [..., out]."""
    return _pointwise(inputs, packed, bias, "none", [], "")


def multiplies_bfloat16(is_x86: bool) -> bool:
    """Whether this processor has instructions for products of bfloat16; False if torch does not say."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if is_x86:
        return any(getattr(torch.cpu, name, bool)() for name in names)
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())


def has_matrix_units() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 much faster than those of float32 here: by AMX. AVX512-BF16 alone brings
    nothing for large products."""
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


# ---- torch's compiler and CUDA graphs; imported when they are needed, which takes a second

_COMPILER: tuple[tuple[str, dict[str, Any]], ...] = (
    # compiling each model separately counts as recompiling the same code
    ("torch._dynamo.config", {"recompile_limit": 10_000, "accumulated_recompile_limit": 10_000}),
    # a model's Python numbers are constants in its code
    ("torch._dynamo.config", {"specialize_float": True, "specialize_int": True}),
    # sizes that are equal now may differ later
    ("torch.fx.experimental._config", {"use_duck_shape": False}),
)
_INDUCTOR = "torch._inductor.config"


def _known(home: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A module with settings of the compiler, and of these values those that this version has a setting for."""
    config: Any = importlib.import_module(home)
    return config, {name: value for name, value in values.items() if hasattr(config, name)}


@functools.cache
def let_compiler_patch() -> None:
    """Let torch's compiler replace methods of `nn.Module` now, as it does when its first function is called. Done later, that
    would look like a change of every model, which is then compiled again."""
    with suppress(Exception), torch.compiler.set_stance("force_eager"):  # a version of Python may have no compiler
        torch.compile(torch.neg, backend="eager")(torch.ones(()))


@contextmanager
def compiler_settings(frozen: bool) -> Iterator[None]:
    """A context in which compiled code fits many models and all sizes. frozen: weights are constants."""
    with ExitStack() as stack:
        for home, values in (*_COMPILER, (_INDUCTOR, {"freezing": frozen})):  # read before the options of a call
            config, known = _known(home, values)
            stack.enter_context(config.patch(known))
        yield


def compile_graph(graph: Any, inputs: Any, options: Mapping[str, Any] | None) -> Any:
    """A graph of torch, compiled by inductor with these options."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx").compile_fx
    return compile_fx(graph, inputs, config_patches=None if options is None else _known(_INDUCTOR, options)[1])


def _nothing() -> None:
    """In builds without CUDA."""


_SHARED = "captured passes share the workspaces of products with other code"
forget_workspaces: Callable[[], None] = (
    _found("torch", "_C._cuda_clearCublasWorkspaces", _SHARED, _nothing) if torch.backends.cuda.is_built() else _nothing
)
"""Free the memory that products use beside their results, on all streams. The next product on a stream allocates it anew."""


def end_pool(pool: Any) -> None:
    """Tell CUDA's allocator that an interrupted capture no longer uses this pool. Raises whatever the version raises."""
    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # type: ignore[attr-defined]


# ---- quanto


def unpack_in_torch(unpack: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Let quanto unpack 4-bit weights on a CPU with this function. It would compile a C++ extension for that otherwise."""
    extensions: Any = importlib.import_module("optimum.quanto.library.extensions")
    if extensions.is_extension_available("quanto_cpp") and extensions.get_extension("quanto_cpp")._lib is None:
        extensions.get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)


def without_gradients(*models: nn.Module) -> AbstractContextManager[Any]:
    """The mode for running models: inference mode, where creating tensors is cheaper, but no_grad for models with quanto's
    layers. Their weights are wrapper subclasses, of which torch makes no views in inference mode."""
    quanto = sys.modules.get("optimum.quanto")  # if it was never imported, there are no such layers
    layer = getattr(quanto, "QModuleMixin", None)
    if layer is not None and any(isinstance(module, layer) for model in models for module in model.modules()):
        return torch.no_grad()
    return torch.inference_mode()


def reads_inputs(module: nn.Module) -> bool:
    """Whether a module reads its inputs on the host: 8-bit products of bitsandbytes that treat outliers apart do."""
    return type(module).__name__ == "Linear8bitLt" and getattr(module.state, "threshold", 0.0) > 0  # type: ignore[union-attr]


# ---- Logits processors with a grammar

GRAMMARS: dict[tuple[str, str], tuple[str, str, bool]] = {
    ("xgrammar.contrib.hf", "LogitsProcessor"): ("matchers", "prefilled", False),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor"): ("_matchers", "is_first_token", True),
    ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor"): ("ll_matchers", "is_first_token", True),
    ("outlines.backends.outlines_core", "OutlinesCoreLogitsProcessor"): ("_guides", "is_first_token", True),
}
"""By module and class: the attribute with the matchers of all rows, which the first call makes, and the attribute that shows
whether there was one, with its value before. A version without these has its calls run in lockstep."""
