"""docs/recipes.md: targets by family, the drafts published for them, and what they take on a card; and the pairs that fit on
usual cards, in docs/howto/consumer-gpu.md.

    python -m tools.recipes --docs docs/recipes.md --fitting docs/howto/consumer-gpu.md

Everything is read from assisted/lab/plan/families.json and nothing is measured. Sizes are those of `assisted plan`.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from assisted.lab.bench.table import markdown_table
from assisted.lab.plan import Shapes, Use, families, parts, recurrent_bytes, weight_bytes
from assisted.methods import DraftModel, Suffix, parse
from benchmarks.shared import publish

MARKER = "recipes"

CARDS = (8, 12, 16, 24)  # GB
CONTEXTS = (2048, 8192)
STEP = 256  # tokens between the contexts that are tried
PAIRS = (
    (24, "Qwen/Qwen3-8B", "bfloat16", "Qwen/Qwen3-0.6B"),
    (24, "Qwen/Qwen3-8B", "bfloat16", "self:nf4"),
    (16, "Qwen/Qwen3-4B", "bfloat16", "Qwen/Qwen3-0.6B"),
    (12, "Qwen/Qwen3-4B", "bfloat16", "Qwen/Qwen3-0.6B"),
    (12, "Qwen/Qwen3-8B", "nf4", "Qwen/Qwen3-0.6B"),
    (12, "Qwen/Qwen3-8B", "nf4", "suffix"),
    (8, "Qwen/Qwen3-4B", "nf4", "suffix"),
)

Fields = Mapping[str, Any]
Sizes = Callable[..., int | None]
"""As `planned`; None if unknown."""


def model_of(fields: Fields) -> PreTrainedModel:
    """The model that a config with these fields describes, on the meta device."""
    return _model(json.dumps(fields, sort_keys=True))


@cache
def _model(fields: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**json.loads(fields))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def planned(
    target: Fields,
    draft: Fields | None,
    context: int,
    weights: str = "bf16",
    expert_bits: float = 16,
    whole: bool = False,
) -> int | None:
    """Bytes of a pair as `assisted plan` counts them, for `context` tokens in one row, in 16 bits.

    weights: of the target. "bf16"; "nf4", which packs linear layers, but not the three-dimensional weights of experts, as
        bitsandbytes does; "stored", where experts take `expert_bits` a number. A draft is in 16 bits.
    whole: all parts on a card; otherwise weights, keys, values and states alone.
    """
    shapes = [_shapes(json.dumps(fields, sort_keys=True)) for fields in (target, draft) if fields is not None]
    use = Use(max(1, context), dtype=torch.bfloat16, quantization="nf4" if weights == "nf4" else None)
    packed = _unpacked_bytes(shapes[0], expert_bits) if weights == "stored" else 0
    if whole:
        spec = DraftModel("draft") if draft is not None else Suffix()
        return (
            sum(part.bytes for part in parts(shapes[0], spec, use, shapes[1] if draft is not None else None)) - packed
        )
    total = -packed
    for one, how in zip(shapes, (use.quantization, None), strict=False):
        total += weight_bytes(one, use, how, torch.bfloat16)
        if context:
            total += 2 * context * sum(one.states.per_token) + recurrent_bytes(one, use, verified=one is shapes[0])
    return total


@cache
def _shapes(fields: str) -> Shapes:
    return Shapes.of_config(model_of(json.loads(fields)).config)


def _unpacked_bytes(shapes: Shapes, expert_bits: float) -> int:
    """Bytes that experts take more in 16 bits than as they are stored."""
    inside = (w.numel() for name, w in shapes.model.named_parameters() if w.ndim == 3 and ".experts." in name)
    return round(sum(inside) * (2 - expert_bits / 8))


def markdown(data: Mapping[str, Any], sizes: Sizes = planned) -> str:
    """What stands between the markers of the page: a section for each family, then the platforms."""
    lines: list[str] = []
    for family in data["families"]:
        lines += ["", f"## {family['name']}", "", family["note"], ""]
        rows = [row for target in family["targets"] for row in _rows(data, target, sizes)]
        head = ["target", "draft", "weights, GB", "in nf4", *(f"at {c // 1024}k" for c in CONTEXTS), "smallest card"]
        lines += markdown_table(head, rows)
        lines += _beside(data, family) + _figures(family)
    return "\n".join([*lines[1:], "", *_platforms(data["platforms"])])


def fitting(data: Mapping[str, Any]) -> str:
    """A table of pairs, and the longest context with which `assisted plan` says that they fit."""
    rows = []
    for card, target, weights, draft in PAIRS:
        longest = _longest(data["models"], card, target, weights, draft)
        rows.append([f"{card} GB", f"`{target}`, {weights}", f"`{draft}`", f"{longest:,}"])
    return "\n".join(markdown_table(["card", "target", "draft", "longest context"], rows))


def _longest(models: Mapping[str, Any], card: int, target: str, weights: str, draft: str) -> int:
    """The tokens of prompt and answer, a multiple of STEP, that fit on a card of `card` GB; 0 if none do."""
    shapes, *drafts = (
        _shapes(json.dumps(models[one]["fields"], sort_keys=True)) for one in (target, draft) if one in models
    )
    spec = DraftModel(draft) if drafts else parse(draft)
    use = Use(dtype=torch.bfloat16, quantization="nf4" if weights == "nf4" else None)

    def size(context: int) -> float:
        return sum(part.bytes for part in parts(shapes, spec, replace(use, context=context), *drafts)) / 1e9

    contexts = range(STEP, shapes.config.max_position_embeddings + 1, STEP)
    return STEP * bisect_right(contexts, card, key=size)


def _shown(target: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [draft for draft in target["drafts"] if draft["status"] == "confirmed"]


def _rows(data: Mapping[str, Any], target: Mapping[str, Any], sizes: Sizes) -> list[list[str]]:
    """One row for each draft that this package reads; a copying drafter where there is none."""
    kinds, name = data["kinds"], target["id"]
    read = [draft for draft in _shown(target) if kinds[draft["kind"]]["line"]]
    rows = []
    for draft in read or [None]:
        spec = "suffix" if draft is None else kinds[draft["kind"]]["line"].format(id=draft["id"])
        rows.append([f"`{name}`", f"`{spec}`", *_sizes(data["models"], name, draft, sizes)])
    return rows


def _sizes(models: Mapping[str, Any], name: str, draft: Mapping[str, Any] | None, sizes: Sizes) -> list[str]:
    """The cells: weights in 16 bits (or as published) and in nf4, keys and values, the smallest card for CONTEXTS[-1]."""
    own = models[name]
    shapes = None if draft is None else models.get(draft.get("like", draft["id"]))  # `like`: tuned from that model
    other = shapes["fields"] if shapes is not None and draft is not None and draft["id"] != name else None
    unknown = " + head" if draft is not None and other is None else ""
    stored = own.get("stored")
    options = {"expert_bits": stored["expert_bits"]} if stored else {}
    formats = {"stored": stored["format"]} if stored else {"bf16": ""}
    formats |= {} if stored else {"nf4": "nf4"}
    cells = []
    for weights, label in formats.items():
        alone = sizes(own["fields"], None, 0, weights=weights, **options)
        both = sizes(own["fields"], other, 0, weights=weights, **options)
        added = "" if other is None or alone is None or both is None else f" + {_gb(both - alone)}"
        cells.append(f"{_gb(alone)}{added}{unknown}" + (f" ({label})" if stored else ""))
    cells += [""] * (2 - len(cells))
    for context in CONTEXTS:
        with_text, without = (sizes(own["fields"], other, length, weights="bf16") for length in (context, 0))
        cells.append("" if with_text is None or without is None else _gb(with_text - without))
    cards = []
    for weights, label in formats.items():
        card = _card(sizes(own["fields"], other, CONTEXTS[-1], weights=weights, whole=True, **options))
        cards.append(f"{card} in {label}" if label else card)
    same = len(set(card.split(" in ")[0] for card in cards)) == 1
    return [*cells, cards[0] if same else ", ".join(card for card in cards if not card.startswith("over"))]


def _gb(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.2f}"


def _card(size: int | None) -> str:
    if size is None:
        return "?"
    fits = [card for card in CARDS if size / 1e9 <= card]
    return f"{fits[0]} GB" if fits else f"over {CARDS[-1]} GB"


def _beside(data: Mapping[str, Any], family: Mapping[str, Any]) -> list[str]:
    """The published drafts that this package does not read."""
    kinds, lines = data["kinds"], []
    for kind, about in kinds.items():
        if about["line"]:
            continue
        found = {
            draft["id"]: draft["source"]
            for target in family["targets"]
            for draft in _shown(target)
            if draft["kind"] == kind
        }
        if found:
            names = ", ".join(f"[`{name}`]({source})" for name, source in found.items())
            lines.append(f"- {about['name']}, {about['says']}: {names}")
    return ["", "Published drafts that this package does not read yet:", "", *lines] if lines else []


def _figures(family: Mapping[str, Any]) -> list[str]:
    lines = []
    for target in family["targets"]:
        for figure in target["figures"]:
            draft = "its own MTP layer" if figure["draft"] == target["id"] else f"`{figure['draft']}`"
            lines.append(f"    - `{target['id']}` with {draft}: {figure['text']} ({_from(figure)})")
    return ["", '??? note "Measured and published speeds"', "", *lines] if lines else []


def _from(stated: Mapping[str, Any]) -> str:
    source = stated["source"]
    return f"{stated['kind']}, [source]({source})" if source.startswith("http") else f"{stated['kind']}, `{source}`"


def _platforms(platforms: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Platforms",
        "",
        "An untested platform may work. We have not tried what other projects say about their packages.",
    ]
    for one in platforms:
        lines += ["", f"**{one['name']}** ({one['tested']})", ""]
        lines += [f"- {fact['topic']}: {fact['text']} ({_from(fact)})" for fact in one["facts"]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose section is rewritten")
    parser.add_argument("--fitting", type=Path, nargs="*", default=[], help="files whose table of pairs is rewritten")
    args = parser.parse_args()
    publish(markdown(families()), args.docs, MARKER)
    publish(fitting(families()), args.fitting, "fitting")


if __name__ == "__main__":
    main()
