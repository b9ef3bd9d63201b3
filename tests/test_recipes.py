"""families.json and the page made from it: the configs describe the published models, and nothing lacks a source.

No checkpoint is read. Of models that also read images or sound, the text model is compared with its published count.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from assisted.lab.plan import Shapes, Use, families, parts
from assisted.methods import Suffix
from assisted.methods.shared import registry

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
DATA: dict[str, Any] = families()
MODELS, KINDS = DATA["models"], DATA["kinds"]
TARGETS = [target for family in DATA["families"] for target in family["targets"]]
DRAFTS = [(target, draft) for target in TARGETS for draft in target["drafts"]]
TOLERANCE = 0.015  # model cards round: 8.4 billion for 8.49

TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
    "shared_expert_intermediate_size": 16, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "top_k_experts": 2, "q_lora_rank": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    pytest.importorskip("sympy")
    return importlib.import_module("tools.recipes")


@pytest.mark.parametrize("name", MODELS)
def test_the_config_has_the_published_number_of_parameters(name: str, recipes: ModuleType) -> None:
    counted = sum(weight.numel() for weight in recipes.model_of(MODELS[name]["fields"]).parameters())
    assert counted == pytest.approx(MODELS[name]["parameters"]["count"], rel=TOLERANCE)


def one_of_each_type() -> list[str]:
    found: dict[str, str] = {}
    for name, model in MODELS.items():
        found.setdefault(name if "gemma-4" in name else model["fields"]["model_type"], name)
    return list(found.values())


def test_recurrent_states_are_those_of_the_plan(recipes: ModuleType) -> None:
    fields = next(model["fields"] for model in MODELS.values() if model["fields"]["model_type"] == "qwen3_5_text")
    small = {key: TINY.get(key, value) if value else value for key, value in fields.items()}
    counted = recipes.planned(small, None, 100) - recipes.planned(small, None, 0)
    shapes = Shapes.of_config(recipes.model_of(small).config)
    found = {part.name: part.bytes for part in parts(shapes, Suffix(), Use(100, dtype=torch.bfloat16))}
    assert counted == 2 * 100 * sum(shapes.states.per_token) + found["target: recurrent states"]


@pytest.mark.parametrize("name", one_of_each_type())
def test_keys_and_values_are_those_of_a_run(name: str, recipes: ModuleType) -> None:
    """A model with the same layers and heads, and less of everything else, stores as much for a token."""
    fields = MODELS[name]["fields"]
    small = {key: TINY.get(key, value) if value else value for key, value in fields.items()}
    if small.get("hidden_size_per_layer_input"):
        small |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    config = AutoConfig.for_model(**small, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache, tokens = DynamicCache(config=config), 5
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + tokens)[None], past_key_values=cache, use_cache=True)
    states = [
        part
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
        for part in (layer.keys, layer.values)
    ]
    stored = sum(part.numel() for part in states)
    states = recipes._shapes(json.dumps(fields, sort_keys=True)).states
    assert sum(states.per_token) * tokens == stored


def test_the_page_is_what_the_data_gives(recipes: ModuleType) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    _, _, rest = page.partition(f"<!-- {recipes.MARKER}:begin -->\n")
    shown, end, _ = rest.partition(f"\n<!-- {recipes.MARKER}:end -->")
    assert end
    assert shown == recipes.markdown(DATA)


def test_sizes_come_from_the_given_function(recipes: ModuleType) -> None:
    def unknown(target: Any, draft: Any, context: int, **others: Any) -> None:
        return None

    text = recipes.markdown(DATA, unknown)
    assert "| `Qwen/Qwen3-8B` | `Qwen/Qwen3-0.6B` | ? | ? |  |  | ? |" in text


def test_what_is_not_confirmed_is_not_shown() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    hidden = [draft["id"] for _, draft in DRAFTS if draft["status"] != "confirmed"]
    assert {draft["status"] for _, draft in DRAFTS} <= {"confirmed", "unconfirmed"}
    assert hidden
    assert not [name for name in hidden if name in page]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["id"])
def test_every_draft_has_a_kind_and_a_source_or_shapes(target: dict[str, Any]) -> None:
    assert target["id"] in MODELS
    for draft in target["drafts"]:
        assert draft["kind"] in KINDS
        if draft["kind"] != "draft-model":
            assert draft["source"].startswith("https://")
        elif draft["status"] == "confirmed":
            sizes = [MODELS[name]["fields"]["vocab_size"] for name in (target["id"], draft["id"])]
            assert min(sizes) > 0.99 * max(sizes)  # one vocabulary, padded to different sizes
            smaller, larger = (MODELS[name]["parameters"]["count"] for name in (draft["id"], target["id"]))
            assert smaller < larger / 2


def test_every_figure_says_where_it_is_from() -> None:
    figures = [figure for target in TARGETS for figure in target["figures"]]
    facts = [fact for platform in DATA["platforms"] for fact in platform["facts"]]
    published = [model["parameters"] for model in MODELS.values()]
    assert {figure["kind"] for figure in figures} <= {"ours measured", "published", "computed"}
    assert {fact["kind"] for fact in facts} <= {"ours measured", "published", "code"}
    for stated in (*figures, *facts, *published):
        source = stated["source"]
        assert re.match(r"https://[\w.-]+\.\w+/\S+$", source) or (ROOT / source).is_file(), source
        if stated.get("kind", "published") != "published":
            assert (ROOT / source).is_file()


def test_the_rows_name_drafts_that_can_be_specified() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert len(rows) > 30
    for target, draft in rows:
        assert target in MODELS
        registry.parse(draft)


def test_the_pairs_that_fit_are_those_of_plan(recipes: ModuleType) -> None:
    """On the page for consumer GPUs, which the README and the home page quote."""
    table = recipes.fitting(recipes.families())
    assert f"<!-- fitting:begin -->\n{table}\n<!-- fitting:end -->" in (ROOT / "docs/howto/consumer-gpu.md").read_text()
    (quoted,) = (row.split("|")[-2].strip() for row in table.splitlines() if "12 GB" in row and "bfloat16" in row)
    pair = (recipes.families()["models"][name]["fields"] for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"))
    needed = recipes.planned(*pair, 2048, whole=True) / 1e9
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert f"[{quoted} tokens](" in text and f" {needed:.1f} GB " in text
