"""assisted: Hugging Face models answer faster on the machine you have, without changing one token. Speculative decoding.

Importing the package imports neither torch nor transformers, so that `assisted --help` is quick: each name is imported when
it is first used. transformers' Auto classes know assisted models nevertheless, see `_Finder`.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
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


class _Finder(MetaPathFinder, Loader):
    """Serves some modules under a second name, and adds assisted models to two tables of transformers.

    `moved`: modules that have moved, under the names that they were documented by before.

    `tables`: modules of transformers with a table of model types, the table, and the class it names for our type. The Auto
    classes look that class up in `transformers.models.assisted` when they meet a pair. So the pair's code is imported then,
    and not while transformers is being imported, when half of its modules could not be used yet.
    """

    moved: ClassVar[dict[str, str]] = {
        "assisted.bench.diagnosis": "assisted.doctor.diagnosis",
        "assisted.bench.doctor": "assisted.doctor.examine",
        "assisted.bench.findings": "assisted.doctor.findings",
        "assisted.controller": "assisted.lengths.adaptive",
        "assisted.law": "assisted.distribution",
        "assisted.quantization": "assisted.loading.quantization",
        "transformers.models.assisted": "assisted.modeling",
    }
    tables: ClassVar[dict[str, tuple[str, str]]] = {
        "transformers.models.auto.configuration_auto": ("CONFIG_MAPPING_NAMES", "AssistedConfig"),
        "transformers.models.auto.modeling_auto": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AssistedModelForCausalLM"),
    }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.moved:
            return ModuleSpec(fullname, self)
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.tables else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._exec_and_add, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # importing it by another name has replaced it

    def _exec_and_add(self, exec_module: Any, module: ModuleType) -> None:
        exec_module(module)
        table, name = self.tables[module.__name__]
        getattr(module, table)["assisted"] = name


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
if not sys.modules.keys().isdisjoint(_Finder.tables):  # the tables are in use: the classes have to be registered
    import_module("assisted.modeling")
