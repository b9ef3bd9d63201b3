"""assisted: Hugging Face models answer faster on the machine you have, without changing one token. Speculative decoding.

Importing the package imports neither torch nor transformers, so that `assisted --help` is quick: each name is imported when
it is first used. transformers' Auto classes know assisted models nevertheless, see `_Finder`.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from . import acceptance, lengths, report, zoo
    from .configuration import AssistedConfig
    from .drafters import (
        Combined,
        DraftModel,
        DraftTree,
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
else:
    _HOMES = {"AssistedConfig": "configuration", "AssistedModelForCausalLM": "modeling", "LossyTypical": "lossy"}

    def __getattr__(name: str) -> Any:
        """A class of `__all__`, or a submodule, which is imported now."""
        if name in __all__ and name[0].isupper():
            return getattr(import_module(f"assisted.{_HOMES.get(name, 'drafters')}"), name)
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
    "AssistedConfig",
    "AssistedModelForCausalLM",
    "Combined",
    "DraftModel",
    "DraftTree",
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


class _Finder(MetaPathFinder):
    """Adds assisted models to two tables of transformers when they are imported.

    transformers offers a registration, but only to code that has imported it, which takes seconds. The Auto classes look up
    the classes of our type in `transformers.models.assisted` when they meet a pair; this package stands there, and imports them
    then.
    """

    tables: ClassVar[dict[str, tuple[str, str]]] = {  # by module: the table, and the class it names for our type
        "transformers.models.auto.configuration_auto": ("CONFIG_MAPPING_NAMES", "AssistedConfig"),
        "transformers.models.auto.modeling_auto": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AssistedModelForCausalLM"),
    }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.tables else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._exec_and_add, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec_and_add(self, exec_module: Any, module: ModuleType) -> None:
        exec_module(module)
        name, kind = self.tables[module.__name__]
        if (table := getattr(module, name, None)) is not None:
            table["assisted"] = kind


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
sys.modules["transformers.models.assisted"] = sys.modules[__name__]
if not sys.modules.keys().isdisjoint(_Finder.tables):  # the tables are in use: the classes have to be registered
    import_module("assisted.modeling")
