"""Targets whose weights lie on a disk, or beside the device, until accelerate fetches them: text and drafts are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from covering import in_turns
from eagle_heads import random_head
from medusa_heads import knowing_what_follows
from pairs import BY_NAME, CALL, no_fallback
from transformers import AutoModelForCausalLM, PreTrainedModel

from assisted import AssistedModelForCausalLM, LayerSkip
from assisted.methods.eagle.formats import save_eagle

accelerate = pytest.importorskip("accelerate")


def fresh() -> PreTrainedModel:
    return build(BY_NAME["llama"], num_hidden_layers=3)


def on_disk(folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(fresh(), str(folder / "weights"), execution_device=torch.device("cpu"))


def beside(folder: Path) -> PreTrainedModel:
    return accelerate.cpu_offload(fresh(), execution_device=torch.device("cpu"))


def partly_on_disk(folder: Path) -> PreTrainedModel:
    fresh().save_pretrained(folder / "model")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"], "cpu")
    places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=str(folder / "weights")
    )


def ends_on_disk(folder: Path) -> PreTrainedModel:
    """The embedding and the head lie elsewhere than the layers between them."""
    fresh().save_pretrained(folder / "model")
    places = {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.layers": "cpu"}
    places |= {"model.norm": "disk", "lm_head": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=str(folder / "weights")
    )


def eagle(version: int) -> Callable[[Path], str]:
    """A head in files, which is read and moved to where the target computes."""

    def saved(folder: Path) -> str:
        (folder / "head").mkdir()
        save_eagle(random_head(fresh(), version), folder / "head")
        return f"eagle:{folder / 'head'}"

    return saved


def medusa(folder: Path) -> str:
    (folder / "head").mkdir()
    knowing_what_follows(fresh()).save(folder / "head", "medusa", fresh())
    return f"medusa:{folder / 'head'}"


PLACES = [on_disk, beside, partly_on_disk, ends_on_disk]
DRAFTS: dict[str, Callable[[Path], Any]] = {
    "default": lambda folder: None,
    "early-exit": lambda folder: "early-exit:1",
    "layer-skip": lambda folder: LayerSkip(0.25, window=8, every=1),
    "draft model": lambda folder: half_right(fresh(), noise=0.1),
    "eagle 1": eagle(1),
    "eagle 3": eagle(3),
    "medusa": medusa,
}


@pytest.mark.parametrize("draft,place", in_turns(list(DRAFTS), PLACES))
def test_offloaded_targets(draft: str, place, tmp_path: Path) -> None:
    ids = random_ids(fresh(), 1, 12, seed=1)
    call = CALL | {"attention_mask": torch.ones_like(ids)}
    pair = AssistedModelForCausalLM.from_models(place(tmp_path), draft=DRAFTS[draft](tmp_path), draft_length=4)
    with no_fallback():
        output = pair.generate(ids, **call)
    assert output.tolist() == fresh().generate(ids, **call).tolist()
    assert pair.report.drafted > 0
    assert pair.report.accepted > 0 or draft in ("default", "eagle 1", "eagle 3")


@pytest.mark.parametrize("place,sampled", in_turns(PLACES, [False, True]))
def test_a_draft_model_drafts_trees_for_them(place, sampled: bool, tmp_path: Path) -> None:
    """Without being asked, and of a size that follows from measured costs."""
    ids = random_ids(fresh(), 2, 12, seed=1)
    call = CALL | {"attention_mask": torch.ones_like(ids), "do_sample": sampled}
    target = place(tmp_path)
    pair = AssistedModelForCausalLM.from_models(target, draft=half_right(fresh(), noise=0.1))
    trees = []
    pair.watch = lambda round: trees.append(round.draft.parents is not None)
    output = pair.generate(ids, **call)
    assert any(trees)
    assert pair.report.accepted > 0
    if not sampled:
        assert output.tolist() == fresh().generate(ids, **call).tolist()
