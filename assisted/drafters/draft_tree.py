"""Drafting large token trees with a small causal LM (SpecExec, 2406.02532): the spec.

Knows how a draft model is loaded. The drafting itself is in tree_drafter.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import Target, require_positive
from .draft_model import DraftModel
from .model_drafter import ModelDrafter
from .other_tokenizer import TranslatedDrafter
from .registry import register
from .tree_drafter import BEAM, CANDIDATES, TreeDrafter


@register("draft-tree")
@dataclass(frozen=True)
class DraftTree(DraftModel):
    """A small causal LM drafts a token tree: `"draft-tree:zoo:draft"`.

    For targets whose forward pass takes about as long for hundreds of positions as for one: above all those with weights on a
    disk or in main memory, which `DraftModel` drafts trees for by itself. The tree holds the most probable paths by the draft's
    probabilities, which are corrected by how often they were right. Sampled tokens are accepted where the target draws a
    drafted token. Models without 4-D masks get chains.

    Args:
        model, quantization, tokenizer: as for `DraftModel`. The tokenizer must be the target's.
        nodes: a fixed tree size. None (default) chooses it by measured costs, at most 1024.
        beam: nodes that the draft reads in a forward pass, at least 1.
        candidates: children that a node may have, at least 1.
    """

    title = "Draft model, large trees"
    trees = True
    has_q = False
    served_as = None
    not_served = "engines draft no trees of this kind; DraftModel drafts chains"

    nodes: int | None = None
    beam: int = BEAM
    candidates: int = CANDIDATES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "nodes", "beam", "candidates")

    @classmethod
    def named(cls, rest: str) -> DraftTree:
        """The spec for `"draft-tree:DIR"`."""
        if not rest:
            raise ValueError(
                "draft: 'draft-tree' does not name a model; write 'draft-tree:DIR' with a folder or Hub id"
            )
        return cls(rest)

    def written(self, folder: str) -> dict[str, Any]:
        return super().written(folder) | {"nodes": self.nodes, "beam": self.beam, "candidates": self.candidates}

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> DraftTree:
        own = {name: fields[name] for name in ("nodes", "beam", "candidates") if name in fields}
        chains = super().read(fields, pair)
        return cls(chains.model, chains.quantization, **own)

    def load(self, target: Target, **kwargs: Any) -> ModelDrafter:
        """As `DraftModel`. Raises ValueError also for a draft with another tokenizer, whose tokens would be translated."""
        drafter = super().load(target, **kwargs)
        if isinstance(drafter, TranslatedDrafter):
            raise ValueError(
                "draft: this draft has another tokenizer than the target, so it drafts chains; use DraftModel"
            )
        return TreeDrafter(drafter.model, drafter.tokenizer, target.model, self.nodes, self.beam, self.candidates)
