"""docs/recipes.md: targets by family, the drafts published for them, and what they take on a card.

    python benchmarks/recipes.py --docs docs/recipes.md

Everything is read from assisted/plan/families.json and nothing is measured. Sizes come from one function that can be exchanged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tables import publish
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from assisted.bench.table import markdown_table

ROOT = Path(__file__).parent.parent
DATA = ROOT / "assisted" / "plan" / "families.json"
MARKER = "recipes"

CARDS = (8, 12, 16, 24)  # GB
RESERVED = 1.0  # GB of a card that logits, captured passes and the driver take, as in docs/howto/consumer-gpu.md
CONTEXTS = (2048, 8192)
NF4 = 0.5 + 4 / 64  # bytes a number: 4 bits, and a float32 for each block of 64

Fields = Mapping[str, Any]
Sizes = Callable[..., int | None]
"""(target's fields, draft's fields or None, context in tokens, weights="bf16" | "nf4" | "stored") -> bytes, None if unknown."""


def families() -> dict[str, Any]:
    """The data file."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def model_of(fields: Fields) -> PreTrainedModel:
    """The model that a config with these fields describes, on the meta device."""
    return _model(json.dumps(fields, sort_keys=True))


@cache
def _model(fields: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**json.loads(fields))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def bytes_by_shapes(
    target: Fields, draft: Fields | None, context: int, weights: str = "bf16", expert_bits: float = 16
) -> int | None:
    """Bytes of a pair's weights, and of its keys, values and states for `context` tokens in one row, by shapes alone.

    weights: of the target. "bf16"; "nf4", which packs the matrices of its layers, but not the three-dimensional weights of
        experts, as bitsandbytes does; "stored", where experts take `expert_bits` a number. A draft is in 16 bits.

    Nothing else is counted: no logits, no activations. The plan of a pair can replace this function.
    """
    total = _weights(target, weights, expert_bits) + (_states(target, context) if context else 0)
    if draft is not None:
        total += _weights(draft, "bf16", 16) + (_states(draft, context) if context else 0)
    return round(total)


def _weights(fields: Fields, weights: str, expert_bits: float) -> float:
    total = 0.0
    for name, weight in model_of(fields).named_parameters():
        each = 2.0
        if weights == "nf4" and weight.ndim == 2 and ".layers." in name:
            each = NF4
        if weights == "stored" and weight.ndim == 3 and ".experts." in name:
            each = expert_bits / 8
        total += weight.numel() * each
    return total


def _states(fields: Fields, context: int) -> int:
    """Keys and values in 16 bits, in slots that hold all tokens: a sliding window saves none, since slots are kept."""
    return sum(_of_layer(fields, layer, context) for layer in range(fields["num_hidden_layers"]))


def _of_layer(fields: Fields, layer: int, context: int) -> int:
    if layer >= fields["num_hidden_layers"] - fields.get("num_kv_shared_layers", 0):
        return 0  # reads those of an earlier layer
    if "kv_lora_rank" in fields:
        return 2 * context * int(fields["kv_lora_rank"] + fields["qk_rope_head_dim"])
    kind = fields["layer_types"][layer] if "layer_types" in fields else "full_attention"
    if kind == "linear_attention":
        return 2 * _recurrent(fields)  # the state and the copy that a rejected draft returns to
    heads, size = fields["num_key_value_heads"], fields["head_dim"]
    if kind == "full_attention" and "global_head_dim" in fields:
        size = fields["global_head_dim"]
        if fields.get("attention_k_eq_v"):
            heads = fields.get("num_global_key_value_heads", heads)
    return 2 * 2 * context * int(heads * size)


def _recurrent(fields: Fields) -> int:
    """Of a gated delta layer: a float32 matrix for each value head, and the last columns of its convolution."""
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    convolution = 2 * fields["linear_conv_kernel_dim"] * (2 * keys + values)
    return int(4 * fields["linear_key_head_dim"] * values + convolution)


def markdown(data: Mapping[str, Any], sizes: Sizes = bytes_by_shapes) -> str:
    """What stands between the markers of the page: a section for each family, then the platforms."""
    lines: list[str] = []
    for family in data["families"]:
        lines += ["", f"## {family['name']}", "", family["note"], ""]
        rows = [row for target in family["targets"] for row in _rows(data, target, sizes)]
        head = ["target", "draft", "weights, GB", "in nf4", *(f"at {c // 1024}k" for c in CONTEXTS), "smallest card"]
        lines += markdown_table([*head, "line"], rows)
        lines += _beside(data, family) + _figures(family)
    return "\n".join([*lines[1:], "", *_platforms(data["platforms"])])


def _shown(target: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [draft for draft in target["drafts"] if draft["status"] == "confirmed"]


def _rows(data: Mapping[str, Any], target: Mapping[str, Any], sizes: Sizes) -> list[list[str]]:
    """One row for each draft that this package reads; a copying drafter where there is none."""
    kinds, name = data["kinds"], target["id"]
    read = [draft for draft in _shown(target) if kinds[draft["kind"]]["line"]]
    rows = []
    for draft in read or [None]:
        spec = "suffix" if draft is None else kinds[draft["kind"]]["line"].format(id=draft["id"])
        shown = "copying" if draft is None else f"`{draft['id']}`"
        if draft is not None and draft["kind"] != "draft-model":
            shown += f" ({kinds[draft['kind']]['name']})"
        line = f'`from_pretrained("{name}", draft="{spec}")`'
        if "loads" in data["models"][name]:
            line = "none: see below"
        rows.append([f"`{name}`", shown, *_sizes(data["models"], name, draft, sizes), line])
    return rows


def _sizes(models: Mapping[str, Any], name: str, draft: Mapping[str, Any] | None, sizes: Sizes) -> list[str]:
    """The cells: weights in 16 bits (or as published) and in nf4, keys and values, the smallest card for CONTEXTS[-1]."""
    own = models[name]
    other = models[draft["id"]]["fields"] if draft is not None and draft["kind"] == "draft-model" else None
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
        card = _card(sizes(own["fields"], other, CONTEXTS[-1], weights=weights, **options))
        cards.append(f"{card} in {label}" if label else card)
    same = len(set(card.split(" in ")[0] for card in cards)) == 1
    return [*cells, cards[0] if same else ", ".join(card for card in cards if not card.startswith("over"))]


def _gb(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.2f}"


def _card(size: int | None) -> str:
    if size is None:
        return "?"
    fits = [card for card in CARDS if size / 1e9 + RESERVED <= card]
    return f"{fits[0]} GB" if fits else f"over {CARDS[-1]} GB"


def _beside(data: Mapping[str, Any], family: Mapping[str, Any]) -> list[str]:
    """The published drafts that this package does not read, and the targets that from_pretrained does not load."""
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
    lines = ["", "Also published, and not read by this package yet:", "", *lines] if lines else []
    refused = [(target["id"], data["models"][target["id"]].get("loads")) for target in family["targets"]]
    for name, reason in refused:
        lines += ["", f"There is no line for `{name}`: {reason}."] if reason else []
    return lines


def _figures(family: Mapping[str, Any]) -> list[str]:
    lines = []
    for target in family["targets"]:
        for figure in target["figures"]:
            draft = "its own MTP layer" if figure["draft"] == target["id"] else f"`{figure['draft']}`"
            lines.append(f"- `{target['id']}` with {draft}: {figure['text']} ({_from(figure)})")
    return ["", "Figures, and where they are from:", "", *lines] if lines else []


def _from(stated: Mapping[str, Any]) -> str:
    source = stated["source"]
    return f"{stated['kind']}, [source]({source})" if source.startswith("http") else f"{stated['kind']}, `{source}`"


def _platforms(platforms: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Platforms",
        "",
        "What was not tested may work. What other projects say of their packages was not tried here.",
    ]
    for one in platforms:
        lines += ["", f"**{one['name']}** ({one['tested']})", ""]
        lines += [f"- {fact['topic']}: {fact['text']} ({_from(fact)})" for fact in one["facts"]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose section is rewritten")
    args = parser.parse_args()
    publish(markdown(families()), args.docs, MARKER)


if __name__ == "__main__":
    main()
