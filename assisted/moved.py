"""Where modules stand that had other names: an import of an old name gives the same module.

Nothing in the package imports by these names. Modules inside a moved package are found through it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "MovedFinder"]

_SHARED = ("base", "chain", "guarded", "lookup", "model_drafter", "part", "registry", "room", "tree_growth", "trees")
_HEADS = {"assistant": "assistant", "block": "dflash", "eagle": "eagle", "medusa": "medusa", "mtp": "mtp"}
_JOINED = """
engine.mixers:engine.stepped engine.columns:engine.masks engine.prefill:engine.passes engine.shapes:engine.passes
engine.rope:engine.traits engine.experts:calls.costs loading.names:extras core.clock:core.host
calls.prompt:calls.assembly methods.shared.training.frozen:methods.shared.training.features
lab.bench.page:lab.bench.table lab.plan.speed:lab.plan.sizes lab.training.plot:lab.training.trainer
lab.training.chats:lab.training.written methods.dflash.runner:methods.dflash.draft grammars.libraries:grammars.matcher
zoo.packages:zoo calls.settings:calls.inputs methods.shared.steps:fast.head_steps
methods.draft_model.pard2:methods.draft_model.pard methods.draft_model.train_pard:methods.draft_model.train
lab.doctor.comparison:lab.doctor.passes lab.handover.readme:lab.handover.package
engine.tree_reader:methods.draft_model.tree engine.signatures:engine.parts
methods.shared.training.plan:methods.shared.training.method
"""

MOVED: dict[str, str] = {
    **dict(pair.split(":") for pair in _JOINED.split()),
    **{name: f"lab.{name}" for name in ("audit", "bench", "doctor", "handover", "plan", "training")},
    **{name: f"core.{name}" for name in ("acceptance", "drafts", "lossy", "report", "text")},
    **{f"engine.{name}": f"core.{name}" for name in ("clock", "host")},
    "admission": "calls.admission",
    "drafters": "methods",
    **{f"drafters.{name}": f"methods.shared.{name}" for name in _SHARED},
    **{f"drafters.{old}": f"methods.{new}.draft" for old, new in _HEADS.items()},
    "drafters.pard": "methods.draft_model.pard",
    "drafters.pard2": "methods.draft_model.pard",
    "drafters.recurrent_drafter": "methods.draft_model.recurrent",
    "drafters.tree_drafter": "methods.draft_model.tree",
    "drafters.suffix_memory": "methods.suffix.memory",
    "drafters.suffix_tree": "methods.suffix.tree",
    "drafters.translation": "methods.other_tokenizer.translation",
    "heads": "methods",
    "heads.base": "methods.shared.heads",
    **{f"heads.{old}": f"methods.{new}.head" for old, new in _HEADS.items()},
    **{f"heads.{old}_config": f"methods.{new}.config" for old, new in _HEADS.items() if old in ("block", "eagle")},
    **{
        f"heads.{old}_formats": f"methods.{new}.formats"
        for old, new in _HEADS.items()
        if old in ("block", "eagle", "mtp")
    },
    "heads.mtp_layouts": "methods.mtp.layouts",
    **{f"heads.{name}": f"methods.shared.{name}" for name in ("files", "runner")},
    "heads.block_runner": "methods.dflash.runner",
    "heads.fused": "methods.eagle.fused",
    **{f"training.{old}": f"methods.{new}.train" for old, new in _HEADS.items()},
    "training.distill": "methods.draft_model.train",
    "training.early_exit": "methods.early_exit.train",
    "training.pard": "methods.draft_model.train",
    **{
        f"training.{name}": f"methods.shared.training.{name}"
        for name in ("data", "features", "frozen", "heads", "losses", "masks", "method", "plan")
    },
}
"""Old names and new ones, without the name of the package."""


class MovedFinder:
    """Finds modules by old names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The specification of a module that another name has now; None for all others."""
        package, _, rest = name.partition(".")
        old = rest
        while old and old not in MOVED:
            old = old.rpartition(".")[0]
        if package != __package__ or not old:
            return None
        return ModuleSpec(name, _Renamed(f"{package}.{MOVED[old]}{rest[len(old) :]}"))


class _Renamed(Loader):
    def __init__(self, name: str):
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: Any) -> None:
        new = importlib.import_module(self.name)
        if module.__name__.partition(".")[2] not in ("drafters", "heads", "training"):
            sys.modules[module.__name__] = new
        else:  # a package of its own, as its modules are set as attributes, and "eagle" is a package now
            module.__path__, module.__doc__, module.__all__ = [], new.__doc__, getattr(new, "__all__", [])
            module.__getattr__ = lambda name: getattr(new, name)
