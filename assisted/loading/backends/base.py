"""What a quantization backend says about itself: its names, the configs they stand for, the shapes it takes, its defects.
Knows transformers' quantization configs; nothing of loading and saving."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...extras import install


def _lacks_nothing() -> str | None:
    """Of a format that runs everywhere."""
    return None


@dataclass(frozen=True)
class Format:
    """One way to store weights. Its name means the same on every machine, so that saved pairs do, too.

    Args:
        config: makes the transformers config for a model that computes in a dtype.
        bytes: of a weight of shape [out, in], as a function of (out, in, bytes of a number that is not quantized).
        multiples: what out_features and in_features must be divisible by; modules of other shapes stay unquantized.
        elsewhere: the names of the formats that replace this one on other devices than a CPU, the best one first; empty: it is
            for all devices.
        lacks: why it does not run on this machine's card; None if it does. A machine without a card may have one some day.
        cards: it is for NVIDIA cards only.
        head: the name of the format of the output embedding; None: that stays as it is.
        code: Python that makes the config, where `{dtype}` stands for the dtype; empty: `resolve` makes it.
    """

    config: Callable[[torch.dtype], QuantizationConfigMixin]
    bytes: Callable[[int, int, int], int]
    multiples: tuple[int, int] = (1, 1)
    elsewhere: tuple[str, ...] = ()
    code: str = ""
    lacks: Callable[[], str | None] = _lacks_nothing
    cards: bool = False
    head: str | None = None


def _unrestricted(config: Any) -> Format | None:
    """Of a config whose modules may have any shape."""
    return None


def _untouched(model: PreTrainedModel) -> None:
    """A model without side effects."""


@dataclass(frozen=True)
class Backend:
    """A way to quantize that transformers knows, in one file.

    Args:
        name: the `quant_method` of its configs.
        formats: by the names that `draft_quantization` and `"self:NAME"` take.
        module: what has to be importable; None if nothing else has to be installed.
        extra: of this package, which installs it.
        configs: the module that has the config classes in the formats' `code`.
        format_of: the format of a config, whose shapes are then required; None for a config without restrictions. Raises
            ValueError for one that cannot be used here.
        skips: the config's field with the names of modules that stay unquantized; None: the backend quantizes all modules.
        modules: the classes of modules that it quantizes.
        settle: works around the side effects on a model that was just loaded.
    """

    name: str
    formats: Mapping[str, Format]
    module: str | None = None
    extra: str = ""
    configs: str = "transformers"
    format_of: Callable[[Any], Format | None] = _unrestricted
    skips: str | None = "modules_to_not_convert"
    modules: tuple[type[nn.Module], ...] = (nn.Linear,)
    settle: Callable[[PreTrainedModel], None] = _untouched

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed; that is not imported."""
        try:
            return self.module is None or importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent of a dotted name
            return False

    def require(self) -> None:
        """Import its package. Raises ImportError with the command that installs it."""
        if self.module is None:
            return
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            command = install(self.extra) if self.extra else f"pip install {self.module}"
            raise ImportError(f"quantization: this needs {self.module}: {command}") from error


def blocks(numbers: int, size: int) -> int:
    """How many blocks of a size hold so many numbers."""
    return -(-numbers // size)
