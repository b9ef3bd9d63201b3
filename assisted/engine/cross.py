"""Encoder-decoders as causal LMs: the decoder, whose cross-attention reads what the encoder made of the call's input.

The encoder runs once in a call. Everything else about the decoder is as for a causal LM: slots, masks, positions, drafts. Knows
transformers' names for the two halves of a model; nothing of drafting.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .cache import SlotCache
from .libraries import CACHE
from .parts import Around, device_of, takes, with_children
from .prepared import PreparedModule

_TRIAL = 5  # columns of the encoder's output in trial runs


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model's decoder reads the output of an encoder of its own."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def position_embedding(model: Any) -> str | None:
    """The name of the module that embeds positions in a decoder whose forward takes none; None if there is none."""
    for name, child in model.get_decoder().named_children():
        if "position" in name and "position_ids" in inspect.signature(child.forward).parameters:
            return name
    return None


@dataclass
class Encoded:
    """What the encoder made of a call's input."""

    states: torch.Tensor  # [B, S, D], the encoder's output
    mask: torch.Tensor | None = None  # [B, S], 0 at padding; None without padding
    # what the encoder has read, for drafts with an encoder of their own: [B', ...] ids or features, where B is a
    # multiple of B'. None if it is unknown.
    source: torch.Tensor | None = None
    encoder: Any = None  # the module that has read it
    cache: Any = None  # that of both attentions, which `generate` prepared
    # the cross-attention's keys and values, by the rows that they are of
    crosses: dict[tuple[int, ...], DynamicCache] = field(default_factory=dict)

    @classmethod
    def split(cls, model: Any, kwargs: dict[str, Any], source: Any) -> tuple[Encoded | None, dict[str, Any]]:
        """Split what `generate` prepared for a model: the encoder's part, if it has one, and the arguments of a causal LM."""
        if not is_encoder_decoder(model):
            return None, kwargs
        names = {"decoder_attention_mask": "attention_mask", "decoder_position_ids": "position_ids"}
        others = {name: value for name, value in kwargs.items() if name not in ("encoder_outputs", "attention_mask")}
        own = {names.get(name, name): value for name, value in others.items()}
        cache = own.get(CACHE)
        # one that holds something already is left as it is: slots cannot stand for it
        if isinstance(cache, EncoderDecoderCache) and not cache.get_seq_length():
            own[CACHE] = cache.self_attention_cache
        encoder = model.get_encoder()
        return cls(kwargs["encoder_outputs"][0], kwargs.get("attention_mask"), source, encoder, cache), own

    @classmethod
    def trial(cls, model: Any, rows: int) -> Encoded:
        """Arbitrary states, which differ between rows, for trial runs of a model's decoder."""
        config = model.config
        width = getattr(config, "d_model", None) or config.get_text_config(encoder=True).hidden_size
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(rows, _TRIAL, width, generator=draw)
        return cls(states.to(device_of(model), model.dtype))

    def again(self, model: Any) -> Encoded:
        """The same input read by the encoder of another model.

        Raises ValueError if what this one has read is unknown.
        """
        encoder = model.get_encoder()
        if encoder is self.encoder:
            return replace(self, cache=None, crosses={})
        if self.source is None or (int(self.source.min()) < 0 and not self.source.is_floating_point()):
            raise ValueError("the call gives the encoder's output instead of its input, which the draft's own needs")
        of_input: dict[str, Any] = {encoder.main_input_name: self.source.to(device_of(model))}
        if self.source.is_floating_point():
            of_input[encoder.main_input_name] = of_input[encoder.main_input_name].to(model.dtype)
        times = len(self.states) // len(self.source)
        mask = self.mask
        if (
            mask is not None
            and mask.shape[:2] == (len(self.states), self.source.shape[1])
            and takes(encoder, "attention_mask")
        ):
            of_input["attention_mask"] = mask[::times].to(device_of(model))
        states = encoder(**of_input, return_dict=True).last_hidden_state.repeat_interleave(times, 0)
        fits = mask is not None and mask.shape == states.shape[:2]
        return Encoded(states, mask if fits else None, self.source, encoder)

    def tokens(self, vocabulary: int) -> list[list[int]]:
        """The input of each row, if it consists of tokens of the decoder's vocabulary, without padding; else nothing."""
        rows, source = len(self.states), self.source
        if source is None or source.is_floating_point() or source.ndim != 2 or int(source.max()) >= vocabulary:
            return [[] for _ in range(rows)]
        times = rows // len(source)
        ids = source.repeat_interleave(times, 0).tolist()
        if self.mask is None or self.mask.shape != (rows, source.shape[1]):
            return ids
        shown = self.mask.bool().tolist()
        return [[token for token, is_text in zip(*row, strict=True) if is_text] for row in zip(ids, shown, strict=True)]

    def around(self, prepared: PreparedModule) -> PreparedModule:
        """A model's decoder, reading this."""
        return replace(prepared, module=Decoder(prepared.module, self), through_parts=False, last_only=False)

    def hand_back(self) -> None:
        """Put the cross-attention's keys and values into the cache that a caller of `generate` passed or gets."""
        cache = self.cache
        found = self.crosses.get(tuple(range(len(self.states))))
        if found is not None:
            cache.cross_attention_cache.layers = found.layers
            cache.is_updated = dict.fromkeys(range(len(found.layers)), True)

    def cross(self, rows: list[int]) -> DynamicCache:
        """The cross-attention's keys and values of these rows; empty, to be filled, if they are read for the first time."""
        key = tuple(rows)
        if key not in self.crosses:
            whole = next((k for k, held in self.crosses.items() if held.layers and set(key) <= set(k)), None)
            made = self.crosses[key] = DynamicCache()
            if whole is not None:
                places = [whole.index(row) for row in rows]
                for index, layer in enumerate(self.crosses[whole].layers):
                    made.update(layer.keys[places], layer.values[places], index)
        return self.crosses[key]


class Positions(Around):
    """The embedding of a decoder's positions, which then may differ between rows.

    own: the module, whose forward counts columns unless it is given positions. ids: [R, n] int64, of the next forward pass;
    None to count.
    """

    _inside = "own"
    ids: torch.Tensor | None = None

    def forward(
        self, given: Any, past: int = 0, position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if self.ids is None:
            return self.own(given, past, position_ids=position_ids, **kwargs)
        flat: torch.Tensor = self.own(given, 0, position_ids=self.ids.flatten())
        return flat.view(*self.ids.shape, -1)


class Decoder(Around):
    """The decoder of an encoder-decoder, called as a causal LM. The model is not changed.

    model: the encoder-decoder. encoded: what its cross-attention reads.
    """

    _inside = "whole"

    def __init__(self, model: Any, encoded: Encoded):
        self.__dict__["encoded"] = encoded
        self.__dict__["positions"] = None
        self.__dict__["takes_ids"] = takes(model, "decoder_position_ids")
        if not self.takes_ids and (name := position_embedding(model)) is not None:
            decoder = model.get_decoder()
            path = next(path for path, module in model.named_modules() if module is decoder)
            self.__dict__["positions"] = Positions(decoder.get_submodule(name))
            model = with_children(model, {(*path.split("."), name): self.positions})
        super().__init__(model)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for the decoder's tokens, [R, n] int64, of the rows that the slots are about to read."""
        cache: SlotCache = kwargs.pop(CACHE)
        rows = _rows_read(cache)
        encoded, every = self.encoded, rows == list(range(cache.rows))
        if self.positions is not None:
            self.positions.ids = position_ids
        elif self.takes_ids and position_ids is not None:
            kwargs["decoder_position_ids"] = position_ids
        return self.whole(
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            encoder_outputs=BaseModelOutput(encoded.states if every else encoded.states[rows]),
            attention_mask=encoded.mask if every or encoded.mask is None else encoded.mask[rows],
            **{CACHE: EncoderDecoderCache(cache, encoded.cross(rows))},
            **kwargs,
        )


def _rows_read(cache: SlotCache) -> list[int]:
    """The rows that the next forward pass runs over, in storage order."""
    if cache.start is not None:
        return cache.running
    places = cache.places
    return cache.order[places] if isinstance(places, slice) else [cache.order[at] for at in places]


def read_by(prepared: PreparedModule, encoded: Encoded | None) -> PreparedModule:
    """A draft whose encoder, if it has one, reads what the target's has read."""
    if encoded is None or not is_encoder_decoder(prepared.module):
        return prepared
    return encoded.again(prepared.module).around(prepared)


def alone(model: Any, encoded: Encoded, rows: list[int], ids: torch.Tensor, cache: Any, **kwargs: Any) -> Any:
    """The output of the model itself over the decoder's tokens, for comparison. cache: EncoderDecoderCache."""
    given = {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(encoded.states[rows]), CACHE: cache}
    return model(**given, use_cache=True, return_dict=True, **kwargs)
