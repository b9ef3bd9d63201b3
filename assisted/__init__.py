"""assisted: Hugging Face models answer faster on the machine you have, without changing one token. Speculative decoding.

Importing the package makes its models known to transformers' Auto classes, which imports transformers and torch. The command
line imports neither before it needs them, so that `assisted --help` answers at once: there, each name is imported when it is
first used.
"""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .moved import MovedFinder

if TYPE_CHECKING:
    from . import lengths, zoo
    from .configuration import AssistedConfig
    from .core import acceptance, report
    from .core.lossy import LossyTypical
    from .engine.pool import SessionPool
    from .grammars import GrammarProcessor, PrefixProcessor
    from .methods import (
        MTP,
        Assistant,
        Candidates,
        Combined,
        DFlash,
        DraftModel,
        DraftTree,
        Eagle,
        EarlyExit,
        LayerSkip,
        Medusa,
        Merged,
        NGram,
        Pard,
        QuantizedSelf,
        Suffix,
        TokenRecycling,
    )
    from .modeling import AssistedModelForCausalLM
else:
    _HOMES = {"AssistedConfig": "configuration", "AssistedModelForCausalLM": "modeling", "LossyTypical": "lossy"}
    _HOMES |= {"GrammarProcessor": "grammars", "PrefixProcessor": "grammars", "SessionPool": "engine.pool"}

    def __getattr__(name: str) -> Any:
        """A class of `__all__`, or a submodule, which is imported now."""
        if name in __all__ and name[0].isupper():
            return getattr(import_module(f"assisted.{_HOMES.get(name, 'methods')}"), name)
        try:
            if not name.startswith("_"):
                return import_module(f"assisted.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"assisted.{name}":
                raise
        raise AttributeError(f"module 'assisted' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "MTP",
    "Assistant",
    "AssistedConfig",
    "AssistedModelForCausalLM",
    "Candidates",
    "Combined",
    "DFlash",
    "DraftModel",
    "DraftTree",
    "Eagle",
    "EarlyExit",
    "GrammarProcessor",
    "LayerSkip",
    "LossyTypical",
    "Medusa",
    "Merged",
    "NGram",
    "Pard",
    "PrefixProcessor",
    "QuantizedSelf",
    "SessionPool",
    "Suffix",
    "TokenRecycling",
    "acceptance",
    "lengths",
    "report",
    "zoo",
]
__version__ = "0.1.0"

sys.meta_path.insert(0, MovedFinder())  # before the one that finds files, which would load a moved package twice

# "-m" is the name of the program while `python -m assisted` imports the package
if PurePath(*getattr(sys, "argv", [""])[:1]).stem not in ("assisted", "-m"):
    import_module("assisted.modeling")
