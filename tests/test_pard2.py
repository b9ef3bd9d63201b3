"""PARD-2 drafts: what they read and propose, their files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from alone import drafts_of
from architectures import build, half_right, random_ids
from covering import in_turns
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, require_plain, said_by
from test_sampling import require_distribution, tiny
from torch import nn

from assisted import AssistedModelForCausalLM, Merged, Pard
from assisted.methods.draft_model.pard import FILE, Pard2Drafter, Pard2Drafting, PardDrafter

MASK, LAYERS, SCALE = 7, [-1, 1], 0.5
pytestmark = pytest.mark.usefixtures("invariants")


def saved(target: Any, folder: Path, bias: bool = False, **fields: Any) -> Path:
    """A half-right draft in the format of AMD's code, with a projection that matters."""
    draft = half_right(target, noise=0.02)
    width = target.config.hidden_size
    config = {"spd_type": "pard2", "pard2": True, "pard_token": MASK, "pard2_scale": SCALE, "pard2_proj_bias": bias}
    draft.config.update({**config, "pard2_target_dim": 2 * width, "pard2_target_layers": LAYERS, **fields})
    draft.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        projection = nn.Linear(2 * width, draft.config.hidden_size, bias=bias)
    torch.save({f"target_proj.{name}": tensor for name, tensor in projection.state_dict().items()}, folder / FILE)
    return folder


def few_features(drafting: Pard2Drafting) -> None:
    assert all(len(features) <= 2 for features in drafting.features)  # what was read is not kept


@torch.no_grad()
def alone(target: Any, drafter: Any, text: list[int], masks: int, reads: bool = True) -> list[int]:
    """What the draft says after a text, by its own forward pass over the text and masks, as in AMD's code."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in LAYERS], -1)
    features = torch.cat([0 * features[:, :1], features[:, :-1]], 1)
    features = torch.cat([features, features[:, -1:].expand(-1, masks, -1)], 1)
    embeddings = drafter.model.get_input_embeddings()(torch.tensor([[*text, *[MASK] * masks]]))
    added = SCALE * drafter.projection(features)
    logits = drafter.model(inputs_embeds=embeddings + reads * added).logits
    found: list[int] = logits[0, -masks - 1 :].argmax(-1).tolist()
    return found


@pytest.mark.parametrize(("name", "fast"), in_turns(["llama", "gpt2", "qwen2"], ["auto", "eager"]))
def test_a_draft_is_what_text_states_and_masks_say(
    name: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(BY_NAME[name])
    folder = str(saved(target, tmp_path, bias=fast == "auto"))
    model = AssistedModelForCausalLM.from_models(target, folder, draft_length=4, fast=fast)
    assert type(model.drafter) is Pard2Drafter
    seen, inputs = drafts_of(monkeypatch, Pard2Drafting, few_features), prompt(rows=3)
    kwargs = CALL | {"attention_mask": inputs["attention_mask"], "eos_token_id": ENDS}
    require_plain(model, inputs["ids"], **kwargs)
    assert len(seen) > 5
    without = []
    for rows, unfinished, proposed, _ in seen:
        for row in unfinished:
            text = rows[row][int((inputs["attention_mask"][row] == 0).sum()) :]
            assert proposed.tokens[row].tolist() == alone(target, model.drafter, text, proposed.width - 1)
            without.append(alone(target, model.drafter, text, proposed.width - 1, reads=False))
    assert without != [draft.tokens[row].tolist() for _, rows, draft, _ in seen for row in rows]  # the states matter


def test_sampling_follows_the_targets_distribution(tmp_path: Path) -> None:
    target = tiny(0, layers=2)
    folder = str(saved(target, tmp_path, pard2_target_layers=[-1, 1], pard_token=3))
    model = AssistedModelForCausalLM.from_models(target, folder, draft_length=2)
    require_distribution(model, seed=21)


def test_turns_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, str(saved(target, tmp_path, bias=True)), draft_length=4)
    seen = drafts_of(monkeypatch, Pard2Drafting, few_features)
    session, text = model.session(), prompt()["ids"]
    for _ in range(3):
        with no_fallback():
            ours = model.generate(text, past_key_values=session, **CALL)
        assert ours.tolist() == said_by(target, text, **CALL).tolist()
        text = torch.cat([ours, random_ids(target, 1, 3, seed=9)], 1)
    for (row,), _, proposed, _ in seen:
        assert proposed.tokens[0].tolist() == alone(target, model.drafter, row, proposed.width - 1)


def test_beside_others(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    folder = str(saved(target, tmp_path))
    inputs = prompt(rows=2)
    kwargs = CALL | {"attention_mask": inputs["attention_mask"]}
    for spec in (["suffix", folder], Merged((folder, half_right(target, 2)))):
        model = AssistedModelForCausalLM.from_models(target, spec, draft_length=4)
        with no_fallback():
            ours = model.generate(inputs["ids"], **kwargs)
        assert ours.tolist() == said_by(target, inputs["ids"], **kwargs).tolist()


def test_a_saved_pair_drafts_the_same(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    folder = str(saved(target, tmp_path / "draft"))
    model = AssistedModelForCausalLM.from_models(target, Pard(folder, tokens=3, draft_window=8), draft_length=4)
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair", draft_length=4)
    assert isinstance(again.drafter, Pard2Drafter)
    assert (again.drafter.tokens, again.drafter.window) == (3, 8)
    assert again.drafter.projection.weight.equal(model.drafter.projection.weight)  # type: ignore[union-attr]
    ids = prompt()["ids"]
    assert again.generate(ids, **CALL).tolist() == model.generate(ids, **CALL).tolist()
    assert again.report is not None and model.report is not None
    assert again.report.drafted == model.report.drafted


def test_without_a_projection_it_drafts_from_tokens_alone(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    folder = saved(target, tmp_path)
    (folder / FILE).unlink()
    with pytest.warns(UserWarning, match=f"has no {FILE}.*drafts from tokens alone"):
        model = AssistedModelForCausalLM.from_models(target, str(folder), draft_length=4)
    assert type(model.drafter) is PardDrafter and model.drafter.mask == MASK
    ids = prompt()["ids"]
    assert model.generate(ids, **CALL).tolist() == said_by(target, ids, **CALL).tolist()


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    for number, (fields, said) in enumerate(
        (
            ({"pard2_target_dim": 4}, r"projection of a PARD-2 draft, holds target_proj.weight of shape \[32, 64\]"),
            ({"pard2_target_layers": [1]}, "it was made for another target"),
            ({"pard2_target_layers": [-1, 99]}, "pard2_target_layers: it reads the hidden states"),
            ({"pard_token": None}, "names no mask token"),
        )
    ):
        folder = saved(target, tmp_path / str(number), **fields)
        with pytest.raises(ValueError, match=said):
            AssistedModelForCausalLM.from_models(target, str(folder))
