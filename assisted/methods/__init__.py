"""The drafting methods, a file or a folder each, and the registry that turns a caller's `draft=` into one of them.

| word     | what it is                                         | how long it lives              | who makes it           |
|----------|----------------------------------------------------|--------------------------------|------------------------|
| Spec     | a method with its options: a frozen dataclass      | like any value; saved in pairs | the caller, or `parse` |
| Drafter  | the loaded method: its weights, and what it learns | as long as the model           | `Spec.load`            |
| Drafting | its state: KV slots, what it has read and proposed | one `generate`                 | `Drafter.start`        |
| Draft    | the tokens proposed for each row, a chain or tree  | one round                      | `Drafting.propose`     |

A folder has the same parts each time, as far as it needs them: `draft` (spec, drafter, drafting), `head` (the module that is
run), `config` and `formats` (checkpoints), `train`. `shared` has what several methods need. No list names the methods' files:
what is here is found, and deleting a file or folder deletes the method.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from .shared.base import Call, Drafter, Drafting, Spec, Target
from .shared.model_drafter import ModelDrafter
from .shared.registry import METHODS, parse, read, register, require_fitting

if TYPE_CHECKING:
    from .assistant.draft import Assistant as Assistant
    from .auto import Auto as Auto
    from .candidate_generator import Candidates as Candidates
    from .combined import Combined as Combined
    from .dflash.draft import DFlash as DFlash
    from .draft_model.draft import DraftModel as DraftModel
    from .draft_model.draft import DraftTree as DraftTree
    from .draft_model.draft import Pard as Pard
    from .eagle.draft import Eagle as Eagle
    from .early_exit.draft import EarlyExit as EarlyExit
    from .layer_skip import LayerSkip as LayerSkip
    from .medusa.draft import Medusa as Medusa
    from .merged import Merged as Merged
    from .mtp.draft import MTP as MTP
    from .ngram import NGram as NGram
    from .quantized_self import QuantizedSelf as QuantizedSelf
    from .recycle import TokenRecycling as TokenRecycling
    from .suffix.draft import Suffix as Suffix

__all__ = [
    "METHODS",
    "Call",
    "Drafter",
    "Drafting",
    "ModelDrafter",
    "Spec",
    "Target",
    "parse",
    "read",
    "register",
    "require_fitting",
]

_ORDER = (
    *("suffix", "ngram", "recycle", "early_exit", "layer_skip", "quantized_self", "draft_model", "medusa", "eagle"),
    *("mtp", "dflash", "assistant", "candidate_generator", "combined", "merged", "auto"),
)
"""The order in which tables list methods. Others come after them; a name without a file is passed over."""


def _found() -> dict[str, type[Spec]]:
    """Import all methods that are here, which registers them. Returns their specs by class name."""
    found = {}
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "shared"]
    for name in sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{__name__}.{name}.draft")
        for value in vars(module).values():
            is_own = isinstance(value, type) and issubclass(value, Spec) and value.__module__ == module.__name__
            if is_own and "name" in vars(value):  # registered
                found[value.__name__] = value
    return found


globals().update(_found())
