"""Multi-token-prediction heads (DeepSeek-V3, 2412.19437): decoder layers of the target's own kind that were trained with the
target. FastMTP (2509.18362) drafts several tokens with one, each time from its own last state. Several draft in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from ...engine.libraries import CACHE, rotary_angles, set_attention
from ...engine.needs import find_final_norm
from ...engine.parts import find_layers, unwrapped
from ...engine.traits import Traits
from ..shared.files import require_tensors, shapes_by_name
from ..shared.heads import Head, HeadSizes, built, rotary_like
from .formats import read_mtp, write_mtp

_NORMS = ("embed_norm", "hidden_norm", "end_norm")
_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"
_FEW = 3  # columns of a trial run


class MTPHead(Head):
    """Predicts the token after next, then from its own states:

        x_i = fuse(embed_norm(E[t_{i+1}]) ; hidden_norm(h_i))        h_i: the target's state after its final norm
        s_i = end_norm(layer(x_i)), from which the output embedding predicts t_{i+2}; in the next step, h_{i+1} is s_i

    The layer, the norms and the rotary embedding are of the target's own classes, with its config. E and the output embedding
    are the target's.

    Args:
        target: the model that it belongs to; it is not changed, and its weights may be on the meta device.
        tensors: `fuse.weight` [H, 2H], embedding first; the target's layer as `layer.*`; `embed_norm.*`, `hidden_norm.*`; and
            optionally `end_norm.*` and `output.weight` [V, H], an output embedding of the head's own. They are not copied.
        index: where its keys and values are in a cache.

    Raises ValueError for a target whose layers cannot serve, and for a missing, unknown or misshapen tensor.
    """

    config: HeadSizes
    title = "MTP head"
    embed_norm: nn.Module
    hidden_norm: nn.Module
    end_norm: nn.Module

    def __init__(self, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor], index: int = 0):
        super().__init__()
        target, self.index = unwrapped(target), index
        traits, layers = Traits.of(target), find_layers(target)
        self.layer_config = copy.deepcopy(target.config.get_text_config(decoder=True))
        set_attention(self.layer_config, "sdpa")
        width = self.layer_config.hidden_size
        self.config = HeadSizes(
            hidden_size=width, vocab_size=traits.vocabulary, taps=(len(layers),), max_position_embeddings=traits.context
        )
        self.register_buffer("d2t", None)
        kind = attention_kind(self.layer_config, index)
        self.rotary_emb, kinds = rotary_like(target, [kind])
        self._kind = kinds[kind]
        self.window = self.layer_config.sliding_window if kind == _SLIDING else None
        self.needs_mask = self.window is not None
        with torch.device("meta"):
            self.layer: Any = _fitting_layer(layers.of(target), self.layer_config, tensors, index)
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.shares_output = "output.weight" not in tensors
            if not self.shares_output:
                self.output = nn.Linear(width, traits.vocabulary, bias=False)
        norm = _same_kind(self.layer, target.get_submodule(".".join(find_final_norm(target, layers))))
        lacks_end = bool(norm.state_dict()) and not any(name.startswith("end_norm.") for name in tensors)
        for name in _NORMS:
            setattr(self, name, nn.Identity() if name == "end_norm" and lacks_end else copy.deepcopy(norm))
        require_tensors(shapes_by_name(tensors), shapes_by_name(self.tensors()), self.title)
        own = {"fc.weight" if name == "fuse.weight" else name: tensor for name, tensor in tensors.items()}
        self.load_state_dict(own, assign=True)
        if any(buffer.is_meta for buffer in self.buffers()) and not self.fc.weight.is_meta:
            raise ValueError(f"target: {type(self.layer).__name__} has buffers that no checkpoint holds")
        self.eval()

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(states.shape[1], device=states.device)[None]
        if self.window is not None:
            if attention_mask is None:
                attention_mask = causal(embeddings)
            attention_mask = only_last(attention_mask, self.window)
        made = self.layer(
            self.fc(torch.cat([self.embed_norm(embeddings), self.hidden_norm(states)], -1)),
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=rotary_angles(self.rotary_emb, states, position_ids, **self._kind),
            use_cache=cache is not None,
            **{CACHE: cache},
        )
        made = made[0] if isinstance(made, tuple) else made
        return self.end_norm(made[:, -1:] if last_only else made)

    def logits(self, states: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Logits [..., V], from the states [..., H] that a step returned. target: needed if the output embedding is its own."""
        return super().logits(states, target) if self.shares_output else self.output(states)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, as it takes them: `fuse.weight` [H, 2H] and so on, in its dtype."""
        return {"fuse.weight" if name == "fc.weight" else name: tensor for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def require_runs(self) -> None:
        """Raise ValueError if its layer does not run as most layers of transformers do, with keys and values in a cache."""
        kind = type(self.layer).__name__
        states = torch.ones(2, 1, _FEW, self.config.hidden_size, device=self.device, dtype=self.dtype)
        mask, cache = states.new_ones(1, 1, _FEW, _FEW, dtype=torch.bool).tril(), DynamicCache()
        try:
            made = self(*states, attention_mask=mask, cache=cache)
        except Exception as error:
            raise ValueError(f"target: {kind} cannot run by itself ({type(error).__name__}: {error})") from error
        if len(cache) != self.index + 1 or cache.get_seq_length(self.index) != _FEW or made.shape != states.shape[1:]:
            raise ValueError(f"target: {kind} does not keep keys and values as other layers do")


class SequentialMTP(Head):
    """Several MTP layers in turn, each of which was trained to predict one token further ahead (2412.19437, section 2.2).

    Let s^0_i be the target's state h_i. Layer k = 1..K gives

        s^k_i = layer_k(s^{k-1}_i, E[t_{i+k}]), with attention to s^k_j for j < i, from which t_{i+k+1} is predicted

    Here, column m is that of token t_m = t_{i+k} in all layers, so layer k reads what layer k - 1 has made of the column
    before. After a text, s^1 of its last column predicts the next token, then s^2 of this token's column the one after it, and
    so on. From there, the last layer goes on from its own states. Positions differ from the paper's by a constant in each
    layer, which makes no difference to rotary embeddings.

    The states of columns are concatenated. Committed text reads [s^0, .., s^{K-1}], where those of layers are of the column
    before, and hands on [s^1, .., s^{K-1}]. A drafted token in depth d reads [s^d, .., s^{K-1}] and hands on
    [s^{d+1}, .., s^{K-1}], at least s^K: so the number of states tells which layers run. The first state is what predicts.

    Args:
        layers: in their order, each with its `index`, and without an output embedding of its own.

    Raises ValueError for one layer, and for one with an output embedding.
    """

    config: HeadSizes
    title = "MTP head"
    shares_output = True
    needs_mask = True

    def __init__(self, layers: Sequence[MTPHead]):
        super().__init__()
        if len(layers) < 2 or not all(layer.shares_output for layer in layers):
            raise ValueError("layers: expected two or more MTP layers that share the target's output embedding")
        self.config, self.layer_config = layers[0].config, layers[0].layer_config
        self.register_buffer("d2t", None)
        self.layers: Any = nn.ModuleList(layers)
        self.eval()

    @property
    def fc(self) -> nn.Linear:  # type: ignore[override]
        return self.layers[0].fc

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., K * H], with zeros where `resume` puts the states of the column before."""
        return F.pad(super().fuse(features), (0, (len(self.layers) - 1) * self.config.hidden_size))

    def resume(self, states: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        if last is not None:
            states[:, 0, self.config.hidden_size :] = last
        return states

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """As `Head`. states: [B, n, r * H], of which the last r layers read one each. If all read, the columns are successive
        text, and layers after the first read in it what the layer before has made of the column before; of `states`, they only
        read the first column's."""
        read = states.split(self.config.hidden_size, -1)
        before = len(self.layers) - len(read)
        if attention_mask is None:
            attention_mask = causal(embeddings)
        made: list[torch.Tensor] = []
        for layer, state in zip(self.layers[before:], read, strict=True):
            if before == 0 and made:
                state = torch.cat([state[:, :1], made[-1][:, :-1]], 1)
            mask = without_first(attention_mask, before + len(made))
            made.append(layer(embeddings, state, position_ids, mask, cache))
        handed_on = torch.cat(made[:-1] or made, -1)
        return handed_on[:, -1:] if last_only else handed_on

    def logits(self, states: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """As `Head`, from the first of the states."""
        return super().logits(states[..., : self.config.hidden_size], target)

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Those of each layer by name, [H, 2H] and so on, in its dtype."""
        return [layer.tensors() for layer in self.layers]

    def require_runs(self) -> None:
        """As `MTPHead`, for all layers."""
        for layer in self.layers:
            layer.require_runs()


def attention_kind(config: Any, index: int) -> str:
    """The attention of an MTP layer, by a text config: full, unless the config says that it is sliding (Mellum). index: of the
    MTP layer."""
    kinds = getattr(config, "mtp_layer_types", None) or ()
    return _SLIDING if kinds[index : index + 1] == [_SLIDING] else _FULL[0]


def layers_like(config: Any, index: int) -> list[int]:
    """The target's layers whose attention is that of an MTP layer, by a text config. index: of the MTP layer. Raises ValueError
    if there is none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    own = attention_kind(config, index)
    fitting = _FULL if own in _FULL else (own,)
    found = [place for place, kind in enumerate(kinds or ["attention"] * config.num_hidden_layers) if kind in fitting]
    if not found:
        raise ValueError(f"target: none of its layers has {own.replace('_', ' ')}, which an MTP head's layer has")
    return found


def first_tensors(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a training starts from: the target's last layer with the attention of an MTP layer, its final norm three times, and
    a fusion that hands on the hidden state. The layer's tensors are the target's own, without gradients."""
    target = unwrapped(target)
    layers, config = find_layers(target), target.config.get_text_config(decoder=True)
    layer = layers.of(target)[layers_like(config, 0)[-1]].state_dict()
    norm = target.get_submodule(".".join(find_final_norm(target, layers))).state_dict()
    like = next(iter(layer.values()))
    eye = torch.eye(config.hidden_size, dtype=like.dtype, device=like.device)
    tensors = {f"layer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {f"{name}.{own}": tensor for name in _NORMS for own, tensor in norm.items()}
    return {**tensors, "fuse.weight": torch.cat([torch.zeros_like(eye), eye], 1)}


def load_mtp(path: str | Path, target: PreTrainedModel, **hub: Any) -> MTPHead | SequentialMTP:
    """Load the head of a checkpoint with all its layers, in its stored dtype, on the CPU.

    path: a folder, a `zoo:` name or a Hub id, of the target's checkpoint or of a head alone. hub: download options.

    Raises ValueError for a checkpoint without a head, and where `MTPHead` does.
    """
    config = unwrapped(target).config.get_text_config(decoder=True)
    heads = [MTPHead(target, tensors, index) for index, tensors in enumerate(read_mtp(path, config, **hub))]
    return SequentialMTP(heads) if len(heads) > 1 else heads[0]


def save_mtp(head: MTPHead | SequentialMTP, folder: str | Path) -> None:
    """Write a head where `load_mtp` finds it."""
    write_mtp(head.tensors() if isinstance(head, SequentialMTP) else [head.tensors()], head.layer_config, folder)


def _fitting_layer(own: Sequence[nn.Module], config: Any, tensors: Mapping[str, torch.Tensor], place: int) -> Any:
    """A layer as the target's last one with the same attention; as its first one if only that has the head's tensors, because
    the last layers of a target may have experts and its head none. own: the target's layers. place: of its keys in a cache."""
    names = {name.removeprefix("layer.") for name in tensors if name.startswith("layer.")}
    found: list[Any] = []
    fitting = layers_like(config, place)
    for index in (fitting[-1], fitting[0]):
        made = built(type(own[index]), config, index)
        if dict(made.named_children()).keys() != dict(own[index].named_children()).keys():
            raise ValueError(f"target: {type(made).__name__} cannot be built from a config and an index alone")
        found.append(made)
    layer = found[1] if found[1].state_dict().keys() == names else found[0]
    for part in layer.modules():
        if hasattr(part, "layer_idx"):
            part.layer_idx = place
    return layer


def _same_kind(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """A module of the layer that is of the same class and size as the target's final norm."""
    for module in layer.modules():
        if type(module) is type(norm) and shapes_by_name(module.state_dict()) == shapes_by_name(norm.state_dict()):
            return module
    raise ValueError(f"target: {type(layer).__name__} has no {type(norm).__name__} like the final norm")


def causal(columns: torch.Tensor) -> torch.Tensor:
    """[1, 1, n, n] bool: each of the columns, [B, n, H], sees itself and those before."""
    return columns.new_ones(*2 * columns.shape[1:2], dtype=torch.bool).tril()[None, None]


def only_last(mask: torch.Tensor, window: int) -> torch.Tensor:
    """[B or 1, 1, n, m] bool, with the last `window` slots of those that each column sees."""
    rank = mask.cumsum(-1)
    return mask & (rank > rank[..., -1:] - window)


def without_first(mask: torch.Tensor, count: int) -> torch.Tensor:
    """[B or 1, 1, n, m] bool, without the first `count` slots that each column sees, for which a layer has no states. Its own
    slot, the last one, is always seen: attention to nothing is NaN."""
    if count == 0:
        return mask
    rank = mask.cumsum(-1)
    return mask & ((rank > count) | (rank == rank[..., -1:]))
