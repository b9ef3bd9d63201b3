"""assisted: Hugging Face models answer faster on the machine you have, without changing one token. Speculative decoding."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from . import acceptance, lengths, report, zoo
from .configuration import AssistedConfig
from .drafters import (
    Combined,
    DraftModel,
    Eagle,
    EarlyExit,
    LayerSkip,
    Medusa,
    Merged,
    NGram,
    QuantizedSelf,
    Suffix,
    TokenRecycling,
)
from .lossy import LossyTypical
from .modeling import AssistedModelForCausalLM

__all__ = [
    "AssistedConfig",
    "AssistedModelForCausalLM",
    "Combined",
    "DraftModel",
    "Eagle",
    "EarlyExit",
    "LayerSkip",
    "LossyTypical",
    "Medusa",
    "Merged",
    "NGram",
    "QuantizedSelf",
    "Suffix",
    "TokenRecycling",
    "acceptance",
    "lengths",
    "report",
    "zoo",
]
__version__ = "0.1.0"


class _Moved(MetaPathFinder, Loader):
    """Modules that have moved, under the names that they were documented by before."""

    names: ClassVar[dict[str, str]] = {
        "assisted.bench.diagnosis": "assisted.doctor.diagnosis",
        "assisted.bench.doctor": "assisted.doctor.examine",
        "assisted.bench.findings": "assisted.doctor.findings",
        "assisted.controller": "assisted.lengths.adaptive",
        "assisted.law": "assisted.distribution",
        "assisted.quantization": "assisted.loading.quantization",
    }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.names[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # importing it by another name has replaced it


if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Moved())
