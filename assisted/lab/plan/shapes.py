"""A model without its weights: its modules on the meta device, and what the headers of its files say about them. Knows
configs, safetensors headers, GGUF files and the models of families.json; nothing of memory or of drafting."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel

from ... import zoo
from ...configuration import AssistedConfig
from ...engine.libraries import chooses_experts
from ...engine.parts import cache_argument
from ...loading.adapters import base_path
from ...loading.classes import auto_class
from ...loading.files import headers
from ...loading.gguf import named_in, read_config
from ...loading.quantization import require_readable
from ...methods.shared import registry
from ...methods.shared.base import Spec

_TOLERANCE = 0.02  # parameters that a checkpoint may have more or fewer than its model: shared tensors, small buffers


@dataclass(frozen=True)
class Shapes:
    """The modules of a causal LM without their weights.

    Args:
        name: as the caller gave it.
        model: on the meta device, in the dtype of the checkpoint.
        stored: bytes of the weights as they are stored, and so of the download; None if only the config is known.
        quantized: the quantization method of the checkpoint; None if its weights are not quantized.
        note: what the figures leave out; empty in most cases.
        path: the folder or Hub id of its safetensors files; None if there are none, or if only the config is known.
        draft: that of a saved pair, whose target this is.
    """

    name: str
    model: PreTrainedModel = field(repr=False)
    stored: int | None
    quantized: str | None = None
    note: str = ""
    path: str | None = None
    draft: Spec | None = None

    @staticmethod
    def read(path: str, role: str = "target", trust_remote_code: bool = False, **hub: Any) -> Shapes:
        """The shapes of a model that is named.

        Args:
            path: a Hub id, a folder, a `zoo:` name or a GGUF file. Of a Hub id, the config and the headers are downloaded. Of a
                folder with a PEFT adapter, the base model is read.
            role: the argument that named it, for messages.
            trust_remote_code: run code that comes with the checkpoint to build its modules.
            hub: `revision` and `token`, for the Hub.

        Of a folder that has a config alone, the weights are counted from it. Where the Hub gives no config, it is read from the
        cache, or else from families.json.

        Raises ValueError where a quantized model has no weights, or where weights do not fit the config, OSError for an
        unknown id and without a connection.
        """
        folder, gguf = named_in(zoo.resolve(path))
        if gguf is not None:
            return Shapes(
                path, _on_meta(read_config(folder, gguf)), Path(gguf).stat().st_size, note="dequantized from GGUF"
            )
        if Path(folder).is_dir() and (base := base_path(folder, role)) != folder:
            found = Shapes.read(base, role)
            told = f"these are the sizes of its base model, {base}, without the adapter"
            return replace(found, name=path, note=f"{told}; {found.note}" if found.note else told)
        if not Path(folder).exists() and (why := _refused(folder, hub)) is not None:
            cached = try_to_load_from_cache(folder, "config.json", revision=hub.get("revision"))
            if isinstance(cached, str):
                folder = str(Path(cached).parent)
            elif path in families()["models"]:
                return _by_families(path, why)
            elif not isinstance(why, HfHubHTTPError):
                listed = "give a folder, or a model of docs/recipes.md"
                raise OSError(f"{role}: {path!r} has no config that can be read: {_said(why)}; {listed}") from why
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **hub)
        except (OSError, ValueError) as error:
            raise type(error)(f"{role}: {path!r} has no config that can be read: {_said(error)}") from error
        require_readable(config, path, role)
        if config.is_encoder_decoder:
            raise ValueError(f"{role}: {config.model_type} is an encoder-decoder; only causal LMs can be planned")
        draft = None
        if isinstance(config, AssistedConfig):
            draft = registry.read(config.draft, Path(folder))
            folder, config = str(Path(folder) / "target"), config.target
        model = _on_meta(config, trust_remote_code)
        method = _method_of(config)
        if Path(folder).is_dir() and not any(Path(folder).glob("*.safetensors")):
            if method is not None:
                raise ValueError(
                    f"{role}: {path!r} is quantized ({method}), and its config does not tell how much its weights take: its "
                    "folder has no *.safetensors files"
                )
            counted = "its folder has no *.safetensors files, so that its weights are counted from the config"
            return Shapes(path, model, None, note=counted, draft=draft)
        tensors = headers(folder, path, role, hub).values()
        stored = sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors)
        numbers = sum(tensor.parameter_count for tensor in tensors)
        expected = sum(weight.numel() for weight in model.parameters())
        note = ""
        if method is None and numbers < (1 - _TOLERANCE) * expected:
            raise ValueError(
                f"{role}: the weights of {path!r} have {numbers:,} numbers, but its config describes {expected:,}; a part of "
                "the checkpoint is missing"
            )
        if method is None and numbers > (1 + _TOLERANCE) * expected:
            note = f"{1 - expected / numbers:.0%} of the checkpoint is not part of the causal LM and is not loaded"
        return Shapes(path, model, stored, method, note, folder, draft)

    @staticmethod
    def of_config(config: PretrainedConfig, name: str = "") -> Shapes:
        """Of a config alone, without looking for weights. They are counted as those of a model that is not quantized."""
        note = (
            f"its weights are counted as if they were not quantized ({method})"
            if (method := _method_of(config))
            else ""
        )
        return Shapes(name or config.model_type, _on_meta(config), None, note=note)

    @property
    def config(self) -> Any:
        """The config of the decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        """Of the decoder."""
        return self.config.num_hidden_layers

    @property
    def numbers(self) -> int:
        """Parameters; tied ones count once."""
        return sum(weight.numel() for weight in self.model.parameters())

    @functools.cached_property
    def states(self) -> States:
        """What the model's cache holds, as a forward pass over two tokens on the meta device shows."""
        try:
            with torch.no_grad():
                cache = DynamicCache(config=self.model.config)
                ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
                self.model(input_ids=ids, use_cache=True, **{cache_argument(self.model): cache})
            return _states(cache)
        except Exception:  # models whose code reads values
            return self._states_by_config()

    def _states_by_config(self) -> States:
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        each = 2 * heads * width
        if getattr(config, "kv_lora_rank", None):  # of latent attention, the latents are kept
            each = config.kv_lora_rank + config.qk_rope_head_dim
        return States(tuple(each for kind in kinds if "attention" in kind and kind != "linear_attention"), 0)


@dataclass(frozen=True)
class States:
    """What a cache holds for one row."""

    per_token: tuple[int, ...]  # numbers in the keys and values of one token, for each layer that has any
    fixed: int  # bytes of the recurrent states of all layers, which do not grow with the text; often in float32


def _states(cache: Any) -> States:
    per_token, fixed = [], 0
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor):
            per_token.append((keys.numel() + values.numel()) // 2)
        for name in ("conv_states", "recurrent_states"):
            found = getattr(layer, name, None) or {}
            fixed += sum(state.numel() * state.element_size() for state in found.values() if state is not None)
    if not per_token and not fixed:
        raise ValueError("the cache is empty")
    return States(tuple(per_token), fixed)


def _method_of(config: PretrainedConfig) -> str | None:
    """How the weights of a checkpoint are quantized; None if they are not."""
    held = getattr(config, "quantization_config", None)
    if held is None:
        return None
    method = held.get("quant_method") if isinstance(held, dict) else getattr(held, "quant_method", None)
    return str(getattr(method, "value", method))


def _refused(path: str, hub: dict[str, Any]) -> Exception | None:
    """Why the Hub does not give the config of this id; None if it does. One request, where loading repeats it for a minute."""
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json", revision=hub.get("revision")), token=hub.get("token"))
    except ValueError:  # no id, as loading will say
        return None
    except Exception as error:  # without a connection, of a class that differs by version
        return error
    return None


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def families() -> dict[str, Any]:
    """families.json: targets that people run, the drafts published for them, and fields of their configs."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
    return found


def _by_families(path: str, why: Exception) -> Shapes:
    """The shapes that families.json holds of a model. why: the Hub does not give its config."""
    known = families()["models"][path]
    model = _on_meta(AutoConfig.for_model(**known["fields"], dtype=torch.bfloat16))
    note = f"its sizes are those of this package's recipes, since the Hub did not answer ({_said(why)})"
    if "checkpoint" in known:
        note += f"; of its {known['checkpoint']} checkpoint, only the text model is counted"
    if "stored" not in known:
        return Shapes(path, model, None, note=note)
    bits = {True: known["stored"]["expert_bits"], False: 16}
    named = model.named_parameters()
    stored = sum(weight.numel() * bits[weight.ndim == 3 and ".experts." in name] for name, weight in named)
    return Shapes(path, model, round(stored / 8), known["stored"]["format"].lower(), note)


def _on_meta(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    text = config.get_text_config(decoder=True)
    stored = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if chooses_experts(model):
        model.set_experts_implementation("batched_mm")  # the only one that reads no values
    return model.eval()
