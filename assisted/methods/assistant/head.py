"""Gemma 4's assistants (`google/gemma-4-...-assistant`): a few small layers with queries only, which attend to the keys and
values of their target. The module, and reading and writing its checkpoints, strictly. Sources: the classes `gemma4_assistant`
and `gemma4_unified_assistant` of transformers, whose formula and tensor names these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import SAFE_WEIGHTS_NAME

from ...engine.cache import SlotLayer
from ...engine.parts import few_ids, find_layers, unwrapped
from ...engine.recurrent import slots_for, target_runner
from ...engine.traits import Traits
from ...loading.files import loading, require_sizes
from ..shared.files import Checkpoint, Layout, find_folder, require_tensors, shapes_by_name, write_head
from ..shared.heads import Head, HeadSizes, rotary_like

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""The model types that are read."""
_REFUSED = {"muse_glimmer_assistant": "it is a block drafter; write draft='dflash:DIR' with its folder or Hub id"}
_FULL, _SLIDING, _WIDTH = "full_attention", "sliding_attention", "backbone_hidden_size"
_REQUIRED = {name: name for name in ("vocab_size", "intermediate_size", "num_attention_heads")}
_REQUIRED |= {"width": "hidden_size", "kinds": "layer_types"}
_OPTIONAL = {name: name for name in ("rms_norm_eps", "attention_bias", "sliding_window", "max_position_embeddings")}
_OPTIONAL |= {"hidden_act": "hidden_activation"}
"""The names in a text config of what is in `AssistantConfig`."""


class Source(NamedTuple):
    """Where layers of one type find keys and values: in that layer of the target, with `heads` of `size` numbers each."""

    layer: int
    heads: int
    size: int


class Keys(NamedTuple):
    """What layers of one type attend to: keys and values [R, heads, S, size], and which of them each row sees, [R, 1, 1, S]
    bool, or each column, [1, 1, n, S]; None for all."""

    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadSizes):
    """The sizes of an assistant. `hidden_size` is Hb, of the states that it takes and returns. Otherwise as `HeadSizes`."""

    kinds: tuple[str, ...]  # the type of each of its layers
    width: int  # H, of its layers, as the sizes that follow
    intermediate_size: int
    num_attention_heads: int
    # their number, and how many of them choose tokens; None if all tokens have logits
    centroids: tuple[int, int] | None
    fields: dict[str, Any] = field(repr=False)  # of its config.json
    rms_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    sliding_window: int = 512  # of its layers of type "sliding_attention"

    @classmethod
    def of(cls, fields: Mapping[str, Any], layers: int) -> AssistantConfig:
        """From a config.json. layers: of the target. Raises ValueError for a missing field and for centroids that don't fit."""
        text, centroids = fields.get("text_config", {}), None
        for name in (_WIDTH, "num_hidden_layers", *_REQUIRED.values()):
            if (fields if name == _WIDTH else text).get(name) is None:
                raise ValueError(f"draft: the config.json of the assistant lacks {name}")
        if len(text["layer_types"]) != text["num_hidden_layers"]:
            raise ValueError(f"draft: layer_types: {text['layer_types']} for {text['num_hidden_layers']} layers")
        if fields.get("use_ordered_embeddings"):
            centroids = count, chosen = fields.get("num_centroids", 2048), fields.get("centroid_intermediate_top_k", 32)
            if text["vocab_size"] % count or chosen > count:
                raise ValueError(
                    f"draft: num_centroids: {count} don't divide {text['vocab_size']} tokens, or are fewer than {chosen}"
                )
        own = {ours: text[name] for ours, name in (_REQUIRED | _OPTIONAL).items() if text.get(name) is not None}
        return cls(hidden_size=fields[_WIDTH], taps=(layers,), centroids=centroids, fields=dict(fields), **own)

    def window(self, kind: str) -> int | None:
        """The sliding window of layers of this type."""
        return self.sliding_window if kind == _SLIDING else None


class AssistantHead(Head):
    """Predicts the token after the newest one, then from its own states, always at the same position:

        x = pre_projection(E[t] ; h)    t: the newest token, h: the target's state of the token before it, after its norm
        z = norm(layers(x))             the keys and values are the target's, of the tokens before t
        logits = output(z);  h = post_projection(z)

    E is the target's embedding. `output` is the assistant's own; with centroids, only the tokens of the best ones have a logit.
    The layers are Gemma 4's: four norms, rotary queries of norm 1, a scale of the output.

    Args:
        target: the model that it drafts for; it is not changed.
        fields: of its config.json. A `text_config` of the target's own type makes an assistant for another architecture; the
            queries are turned in halves, as Llama's are.
        tensors: by the names of transformers' class. They are not copied. None for new ones, to be trained.

    Raises ValueError for a target that lacks what it reads, and for a missing, unknown or misshapen tensor.
    """

    config: AssistantConfig
    title, shares_output, reads_end = "assistant", False, True
    model: Any  # named as in transformers' class
    masked_embedding: Any

    def __init__(self, target: PreTrainedModel, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None):
        super().__init__()
        target = unwrapped(target)
        self.config = config = AssistantConfig.of(fields, len(find_layers(target)))
        self.sources = sources_of(target, config.kinds)
        if any(config.num_attention_heads % source.heads for source in self.sources.values()):
            raise ValueError(
                f"its {config.num_attention_heads} attention heads cannot share those of the target's keys"
            )
        self.register_buffer("d2t", None)
        self.rotary_emb, self._kinds = rotary_like(target, self.sources, fields["text_config"].get("rope_parameters"))
        for kind, source in self.sources.items():
            turns = self.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64), **self._kinds[kind])
            if not isinstance(turns, tuple) or turns[0].shape[-1] > source.size:
                raise ValueError(f"target: {type(target).__name__} turns its keys in another way than in halves")
        with torch.device("meta"):
            self.pre_projection = nn.Linear(2 * config.hidden_size, config.width, bias=False)
            self.post_projection = nn.Linear(config.width, config.hidden_size, bias=False)
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.width)
            self.model.layers = nn.ModuleList(_Layer(config, self.sources[kind].size) for kind in config.kinds)
            self.model.norm = _Norm(config.width, config.rms_norm_eps)
            self.masked_embedding = None if config.centroids is None else _Centroids(config, *config.centroids)
        tensors = _initial(self) if tensors is None else _untied(tensors, fields)
        require_tensors(shapes_by_name(tensors), shapes_by_name(self.state_dict()), "it")
        self.load_state_dict(tensors, assign=True)
        ordering = [] if config.centroids is None else self.masked_embedding.token_ordering.tolist()
        if sorted(ordering) != list(range(len(ordering))):
            raise ValueError("draft: masked_embedding.token_ordering does not hold each token once")
        self.eval()

    def forward(  # type: ignore[override]
        self, embeddings: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, keys: Mapping[str, Keys]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step over n columns, none of which sees another.

        embeddings: [R, n, Hb], of each column's token. states: [R, n, Hb], the target's or from the step before. position_ids:
        [R, 1] or [1, n] int64, the same in all steps. keys: by type of layer, of the rows.

        Returns what `logits` takes, [R, n, H], and the next states, [R, n, Hb].
        """
        hidden = self.pre_projection(torch.cat([embeddings, states], -1))
        turns = {kind: self.rotary_emb(hidden, position_ids, **self._kinds[kind]) for kind in keys}
        for layer, kind in zip(self.model.layers, self.config.kinds, strict=True):
            hidden = layer(hidden, turns[kind], keys[kind])
        ended = self.model.norm(hidden)
        return ended, self.post_projection(ended)

    def logits(self, states: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Logits [..., V] of what a step returned, [..., H]; minus infinity for tokens without one. target: not needed."""
        weight = self.model.embed_tokens.weight
        if self.masked_embedding is None:
            return states @ weight.T  # type: ignore[no-any-return]
        return self.masked_embedding(states, weight)  # type: ignore[no-any-return]

    @property
    def fc(self) -> nn.Linear:  # type: ignore[override]
        return self.pre_projection


class _Norm(nn.Module):
    """The root mean square norm, in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states.float(), self.weight.shape, self.weight.float(), self.eps).to(states.dtype)


class _Layer(nn.Module):
    """A decoder layer without keys and values of its own. size: of an attention head."""

    def __init__(self, config: AssistantConfig, size: int):
        super().__init__()
        width, inner, eps = config.width, config.intermediate_size, config.rms_norm_eps
        heads, bias, self.size = config.num_attention_heads * size, config.attention_bias, size
        self.self_attn: Any = nn.Module()
        self.mlp: Any = nn.Module()
        self.self_attn.q_proj, self.self_attn.o_proj = nn.Linear(width, heads, bias), nn.Linear(heads, width, bias)
        self.self_attn.q_norm = _Norm(size, eps)
        self.mlp.gate_proj, self.mlp.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.mlp.down_proj = nn.Linear(inner, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = _Norm(width, eps), _Norm(width, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = _Norm(width, eps), _Norm(width, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)  # a buffer would not be cast
        self.act: Any = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], keys: Keys) -> torch.Tensor:
        rows, columns = hidden.shape[:2]
        attn, mlp = self.self_attn, self.mlp
        queries = attn.q_norm(attn.q_proj(self.input_layernorm(hidden)).view(rows, columns, -1, self.size))
        queries = _turned(queries, *turns).transpose(1, 2)  # [R, heads, n, size]
        attended = scaled_dot_product_attention(
            queries, keys.keys, keys.values, attn_mask=keys.seen, scale=1.0, enable_gqa=True
        )
        attended = attn.o_proj(attended.transpose(1, 2).reshape(rows, columns, -1))
        hidden = hidden + self.post_attention_layernorm(attended)
        inner = self.pre_feedforward_layernorm(hidden)
        inner = mlp.down_proj(self.act(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return (hidden + self.post_feedforward_layernorm(inner)) * self.layer_scalar


class _Centroids(nn.Module):
    """Finds the tokens that get a logit: those of the centroids with the largest products."""

    def __init__(self, config: AssistantConfig, count: int, chosen: int):
        super().__init__()
        self.count, self.chosen = count, chosen
        self.centroids = nn.Linear(config.width, count, bias=False)
        self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.int64))

    def forward(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., H] and the output embedding [V, H] -> logits [..., V]."""
        best = self.centroids(states).topk(self.chosen).indices
        ordering: Any = self.token_ordering
        tokens = ordering.view(self.count, -1)[best].flatten(-2)
        logits = (weight[tokens] @ states[..., None]).squeeze(-1)
        return logits.new_full((*states.shape[:-1], len(weight)), -torch.inf).scatter(-1, tokens, logits)


def _turned(queries: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [R, n, heads, size] in halves. cos, sin: [R, 1, d], for the first d numbers of a head."""
    turned, kept = queries.split([cos.shape[-1], queries.shape[-1] - cos.shape[-1]], -1)
    one, two = turned.chunk(2, -1)
    return torch.cat([turned * cos[:, :, None] + torch.cat([-two, one], -1) * sin[:, :, None], kept], -1)


@torch.no_grad()
def sources_of(model: PreTrainedModel, kinds: Iterable[str]) -> dict[str, Source]:
    """For each type of layer, the target's last layer of that type that keeps keys and values; found by running a few tokens.

    Raises ValueError if there is none.
    """
    config, traits, ids = model.config.get_text_config(decoder=True), Traits.of(model), few_ids(model)
    if traits.keeps and not traits.is_recurrent:  # not in slots, which the pass below fills
        raise ValueError(
            f"target: {type(model).__name__} keeps {traits.keeps[0]}, and an assistant reads keys and values"
        )
    kept = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = types_of(config)[:kept]
    slots = slots_for(model, None, 1, ids.shape[1], traits.masks)
    target_runner(model, slots, traits.masks).prefill(ids, None)
    found = {}
    for kind in dict.fromkeys(kinds):
        index = max((i for i, name in enumerate(types) if name == kind), default=-1)
        layer = slots.layers[index] if 0 <= index < len(slots.layers) else None
        if not isinstance(layer, SlotLayer) or not layer.is_initialized or layer.keys.shape != layer.values.shape:
            raise ValueError(f"target: {type(model).__name__} keeps no keys and values of a layer with {kind}")
        found[kind] = Source(index, layer.keys.shape[1], layer.keys.shape[3])
    return found


def fields_for(target: PreTrainedModel, layers: int = 4, **sizes: Any) -> dict[str, Any]:
    """The config.json of an assistant for a target of any architecture: the last layer has the type of the target's last layer
    with attention, the others that of its first. sizes: of the layers, such as `hidden_size`, by default the target's.
    """
    config = unwrapped(target).config.get_text_config(decoder=True)
    types = [kind for kind in types_of(config) if kind in (_FULL, _SLIDING)] or [_FULL]
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "layer_types": [types[0]] * (layers - 1) + [types[-1]],
        "num_kv_shared_layers": layers,
        "sliding_window": getattr(config, "sliding_window", None) or 512,
        "max_position_embeddings": Traits.of(target).context,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": getattr(config, "num_attention_heads", 1),
        **sizes,
    }
    return {"model_type": KINDS[0], _WIDTH: config.hidden_size, "text_config": text}


def types_of(config: Any) -> list[str]:
    """The type of each layer, by a text config."""
    found = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if found is None:
        found = [_FULL if getattr(config, "sliding_window", None) is None else _SLIDING] * config.num_hidden_layers
    return [_FULL if name == "attention" else name for name in found]


def is_assistant(fields: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is an assistant, of those that are refused, too. fields: of its config.json."""
    return fields.get("model_type") in (*KINDS, *_REFUSED)


def load_assistant(path: str | Path, target: PreTrainedModel, **hub: Any) -> AssistantHead:
    """Load an assistant, in its stored dtype, on the CPU. path: a folder or a Hub id. hub: download options.

    Raises ValueError for a checkpoint of another kind, and where `AssistantHead` does.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        found = Checkpoint.open(folder, (SAFE_WEIGHTS_NAME,)).under(Layout())
        fields, text = found.fields, found.fields.get("text_config")
        require_kind(fields, folder)
        if not isinstance(text, dict):
            raise ValueError(f"draft: {folder / 'config.json'} has no text_config")
        for name, some in (("text_config", text), (_WIDTH, {"hidden_size": fields.get(_WIDTH)})):
            require_sizes(some, found.shapes, f"{folder / 'config.json'}: {name}", exact=True)
        return AssistantHead(target, fields, found.tensors())


def require_kind(fields: Mapping[str, Any], where: str | Path) -> None:
    """Raise ValueError for a checkpoint that is no assistant, or one of another method. where: for the message."""
    kind = str(fields.get("model_type"))
    if kind not in KINDS:
        raise ValueError(
            f"draft: {where} holds a model of type {kind!r}: {_REFUSED.get(kind, f'expected {KINDS[0]} or {KINDS[1]}')}"
        )


def save_assistant(head: AssistantHead, folder: str | Path) -> None:
    """Write an assistant where `load_assistant` finds it."""
    write_head(folder, head.config.fields, head.state_dict())


def _initial(head: AssistantHead) -> dict[str, torch.Tensor]:
    """What a training starts from: normal matrices, and norms that keep the size."""
    tensors = {name: torch.empty(tensor.shape) for name, tensor in head.state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith("token_ordering"):
            tensors[name] = torch.arange(len(tensor))
        elif tensor.ndim == 2:
            nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
        else:  # queries get the scale that the attention does not have
            tensor.fill_(
                tensor.shape[0] ** -0.5 if name.endswith("q_norm.weight") else float(not name.endswith("bias"))
            )
    return tensors


def _untied(tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors with the output embedding as `model.embed_tokens.weight`: the input embedding is the target's."""
    found, own = dict(tensors), "model.embed_tokens.weight"
    output = found.pop("lm_head.weight", None)
    if output is not None and (own not in found or not fields.get("tie_word_embeddings", True)):
        found[own] = output
    return found
