"""The config.json of a saved pair: the target's configuration, the draft and the draft length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from .engine.libraries import CONFIG_FIELDS, CONFIG_ORIGIN

__all__ = ["AssistedConfig"]

_OF_TARGET = frozenset(  # fields that every config has, and that decide how the target runs
    {*CONFIG_FIELDS, CONFIG_ORIGIN, "output_hidden_states", "return_dict"}
)
_CODE = "modeling_assisted"
_CODE_FILE = '''\
"""This folder holds two models that generate together. This file imports the package that reads them, `assisted`.

With `trust_remote_code=True` transformers runs this file. If `assisted` was imported before, this file is not needed.
"""

try:
    from assisted import AssistedConfig, AssistedModelForCausalLM
except ImportError as error:
    raise ImportError(
        "This folder is an assisted model. The Python package `assisted` loads it, and is not installed here. Install it, or "
        "load the target alone, an ordinary model, from the subfolder `target`."
    ) from error

__all__ = ["AssistedConfig", "AssistedModelForCausalLM"]
'''

_ENTRY = '''\
"""`model.generate(**inputs, custom_generate=THIS_REPOSITORY, trust_remote_code=True)` is faster with the draft named here.

The text is the same as without it. The Python package `assisted` does the work.
"""

try:
    from assisted.lab.handover.custom_generate import drafting_with
except ImportError as error:
    raise ImportError(
        "custom_generate: the Python package `assisted` drafts for this model, and is not installed here. Install it, or call "
        "generate without custom_generate."
    ) from error

generate = drafting_with(
    draft={draft},
    draft_length={draft_length},
    has_files={has_files},
)
'''


class AssistedConfig(PretrainedConfig):
    """The configuration of an assisted model.

    All other attributes belong to the target's configuration: code that reads the vocabulary size or the context length gets
    the target's, and code that sets `use_cache` or the attention implementation sets the target's.

    Args:
        target: the target's configuration, or its dict form.
        draft: the drafting method: {"method": "draft-model", "quantization": ...}; the model itself is in `draft/`.
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
            target = _read(target)
        self.target: Any = None  # what is set up below is this object's own
        self.draft = draft
        self.draft_length = draft_length
        super().__init__(**kwargs)
        self.target = target

    def _is_of_target(self, name: str) -> bool:
        """Whether a field is the target's although this object has one as well."""
        if name not in _OF_TARGET or self.__dict__.get("target") is None:
            return False
        # a pair's config that was read without its model has the name of the folder, the target's has none
        return name != CONFIG_ORIGIN or bool(self.target.name_or_path)

    def __getattribute__(self, key: str) -> Any:
        if key in _OF_TARGET and self._is_of_target(key):
            return getattr(self.target, key)
        return super().__getattribute__(key)

    def __setattr__(self, key: str, value: Any) -> None:
        target = self.__dict__.get("target")
        lacks = key not in self.__dict__ and not hasattr(type(self), key)
        if self._is_of_target(key) or (lacks and not key.startswith("_") and hasattr(target, key)):
            setattr(target, key, value)
        else:
            super().__setattr__(key, value)

    def __getattr__(self, name: str) -> Any:
        # called only for attributes that this object lacks
        target = self.__dict__.get("target")
        if name.startswith("_") or target is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(target, name)
        except Exception as error:  # some configs raise their own error for fields that differ between layers
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from error

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PretrainedConfig:
        """The target's text configuration."""
        return self.target.get_text_config(decoder=decoder, encoder=encoder) if self.target is not None else self

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the names by which transformers loads the pair when `assisted` was not imported."""
        classes = {"AutoConfig": "AssistedConfig", "AutoModelForCausalLM": "AssistedModelForCausalLM"}
        fields = super().to_dict() | {"auto_map": {auto: f"{_CODE}.{name}" for auto, name in classes.items()}}
        if isinstance(fields.get("target"), dict):
            fields["target"].pop(CONFIG_ORIGIN, None)  # where it was read from is nobody else's business
        return fields

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and the modeling_assisted.py that it names."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_CODE}.py").write_text(_CODE_FILE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def save_entry(self, folder: Path) -> None:
        """Write `custom_generate/generate.py` into a saved pair's folder, for `generate(custom_generate=FOLDER_OR_ID)`."""
        entry = folder / "custom_generate" / "generate.py"
        entry.parent.mkdir(exist_ok=True)
        has_files = (folder / "draft").is_dir()
        text = _ENTRY.format(draft=repr(self.draft), draft_length=repr(self.draft_length), has_files=has_files)
        entry.write_text(text, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would write a copy of this class's code into every folder."""


def _read(fields: dict[str, Any]) -> PretrainedConfig:
    """A target's config from its dict form; a plain PretrainedConfig if transformers does not have its type."""
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"target: model_type: {kind!r} in the config of a saved pair is not a model type")
    if kind not in CONFIG_MAPPING:
        return PretrainedConfig.from_dict(fields)
    return AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name != "model_type"})


AutoConfig.register("assisted", AssistedConfig, exist_ok=True)  # here, as planning reads configs and no models
