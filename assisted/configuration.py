"""How a pair is written down: config.json of a folder that holds a target, its draft and how they go together."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

__all__ = ["AssistedConfig"]


class AssistedConfig(PretrainedConfig):
    """The configuration of an assisted model.

    Anything it does not hold itself is read from the target's configuration, so that code which asks a model for its
    vocabulary size or context length gets the target's.

    Args:
        target: the target's configuration, or its dict form.
        draft: how the draft is made: {"method": "draft-model", "quantization": ...}; the model lies in `draft/`.
        draft_length: {"policy": name, ...its fields}, or None for the default.
    """

    model_type = "assisted"

    def __init__(
        self,
        target: PretrainedConfig | dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
        draft_length: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if isinstance(target, dict):
            fields = dict(target)
            target = AutoConfig.for_model(fields.pop("model_type"), **fields)
        self.target: Any = target
        self.draft = draft
        self.draft_length = draft_length
        super().__init__(**kwargs)

    def __getattr__(self, name: str) -> Any:
        # only asked for what this object lacks
        target = self.__dict__.get("target")
        if name.startswith("_") or target is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(target, name)
        except Exception as error:  # some configs raise their own error for what differs from layer to layer
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from error

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PretrainedConfig:
        """The target's text configuration."""
        return self.target.get_text_config(decoder=decoder, encoder=encoder) if self.target is not None else self
