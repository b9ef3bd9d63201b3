"""Drafts that predict the most frequent tokens only: how their vocabulary is reduced, what they draft, and that texts stay the
target's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import RECURRENT, build, half_right
from block_heads import trained_block
from eagle_heads import trained_head
from methods import in_parallel
from mtp_heads import trained_mtp
from pairs import BY_NAME, CALL, ENDS, prompt, require_plain, said_by
from test_sampling import require_distribution, tiny
from torch import nn
from transformers import AutoConfig

from assisted import AssistedModelForCausalLM, DFlash, DraftTree, Eagle
from assisted.cli.main import main
from assisted.core.drafts import Draft
from assisted.engine.kept import KEY, Kept, kept_tokens, over_all, with_kept_output, written
from assisted.lab.training.shrink import coverage, shrink_vocabulary, shrunk_head
from assisted.methods.dflash.formats import save_block
from assisted.methods.draft_model.recurrent import RecurrentDrafter
from assisted.methods.eagle.formats import save_eagle
from assisted.methods.mtp.head import save_mtp
from assisted.methods.shared.model_drafter import ModelDrafting
from assisted.methods.shared.training.data import Text

pytestmark = pytest.mark.usefixtures("invariants")
SOME = torch.tensor([2, 3, 7, 11, 12, 13, 20, 33])


def limited(model: Any, tokens: torch.Tensor = SOME) -> Any:
    """The model, whose config now says that it predicts these tokens only."""
    model.config.update({KEY: written(tokens, model.config.get_text_config(decoder=True).vocab_size, 0.5, "a text")})
    return model


def some_text(target: Any) -> Text:
    """Token i comes i % 7 + (i < 20) * 10 times."""
    size = target.config.vocab_size
    stream = np.concatenate([np.full(i % 7 + (i < 20) * 10, i) for i in range(size)]).astype(np.int32)
    return Text(stream, np.arange(size, dtype=np.int32), "counted")


def drafted(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Draft]:
    """The drafts that draftings of this kind propose from now on."""
    seen, propose = [], kind.propose

    def watched(self: Any, text: Any, budget: int) -> Any:
        seen.append(propose(self, text, budget))
        return seen[-1]

    monkeypatch.setattr(kind, "propose", watched)
    return seen


def test_ids_in_a_config() -> None:
    model = limited(build(BY_NAME["llama"]))
    found, size = kept_tokens(model.config), model.config.vocab_size
    assert found is not None and found.tolist() == SOME.tolist() and found.dtype == torch.int64
    assert json.dumps(model.config.to_dict()[KEY])
    assert kept_tokens(build(BY_NAME["llama"]).config) is None
    for broken in ({"kept": "x"}, {"tokens": 3}, {"kept": None}, {"tokens": 0}):
        other = copy.deepcopy(model.config)
        other.update({KEY: {**getattr(model.config, KEY), **broken}})
        with pytest.raises(ValueError, match=f"{KEY} cannot be read"):
            kept_tokens(other)
    with pytest.raises(ValueError, match=f"{KEY} cannot be read"):  # an id that the model does not have
        model.config.update({KEY: written(torch.tensor([1, size]), size + 8, 0.5, "")})
        Kept(model.config)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_logits_are_those_of_the_kept_tokens(name: str) -> None:
    model = build(BY_NAME[name])
    ids = prompt()["ids"]
    own = model(ids).logits
    other = with_kept_output(model, SOME)
    found = other(ids).logits
    assert found.shape[-1] == len(SOME)
    torch.testing.assert_close(found, own[..., SOME])
    full = over_all(found, SOME, own.shape[-1])
    assert full[..., SOME].equal(found) and full.isfinite().sum(-1).unique().tolist() == [len(SOME)]
    assert model(ids).logits.equal(own)  # nobody's model was changed


def test_the_layer_is_made_again_when_the_weights_are_replaced() -> None:
    model = limited(build(BY_NAME["llama"]))
    kept = Kept(model.config)
    first = kept.of(model)
    assert kept.of(model) is first and copy.deepcopy(kept).of(model) is not first
    model.double()
    assert kept.of(model) is not first and kept.of(model).lm_head.weight.dtype == torch.float64
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="rows of the output layer, a Sequential, cannot be copied"):
        Kept(model.config).of(model)


@pytest.mark.parametrize("fast", ["auto", "eager"])
@pytest.mark.parametrize("kind", ["chains", "pard", "trees", "recurrent"])
def test_texts_are_the_targets(kind: str, fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["llama"])
    draft = limited(half_right(target, noise=0.02), torch.arange(0, target.config.vocab_size, 2))
    if kind == "recurrent":
        draft = limited(build(next(one for one in RECURRENT if one.name == "qwen3_5")), torch.arange(0, 64, 2))
    if kind == "pard":
        draft = in_parallel(draft)
    spec = DraftTree(draft, nodes=12, beam=4, candidates=4) if kind == "trees" else draft
    model = AssistedModelForCausalLM.from_models(target, spec, draft_length=4, fast=fast)
    assert isinstance(model.drafter, RecurrentDrafter) == (kind == "recurrent")
    seen = drafted(monkeypatch, ModelDrafting)
    for rows in (1, 3):
        inputs = prompt(rows)
        kwargs = CALL | {"attention_mask": inputs["attention_mask"], "eos_token_id": ENDS if rows > 1 else None}
        require_plain(model, inputs["ids"], **kwargs)
    own = [
        token
        for draft in seen
        for row, n in zip(draft.tokens, draft.lengths, strict=True)
        for token in row[:n].tolist()
    ]
    assert own and all(token % 2 == 0 for token in own)
    if kind not in ("recurrent", "pard"):
        assert model.totals.accepted > 0


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_sampling_follows_the_targets_distribution(kind: str) -> None:
    """The target draws tokens that the draft can't, which is what would go wrong with a q over the kept tokens alone."""
    target = tiny(0, layers=2)
    draft = limited(half_right(target), torch.arange(0, target.config.vocab_size, 2))
    spec = DraftTree(draft, nodes=8, beam=4, candidates=4) if kind == "trees" else draft
    model = AssistedModelForCausalLM.from_models(target, spec, draft_length=2)
    require_distribution(model, seed=21)


# ---- the command


def test_a_draft_model_is_written(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    half_right(target).save_pretrained(tmp_path / "draft")
    text = some_text(target)
    found = shrink_vocabulary(str(tmp_path / "draft"), 20, text, tmp_path / "small", target)
    size = target.config.vocab_size
    assert found == {"tokens": 20, "of": size, "coverage": round(20 / size, 6)}
    model = AssistedModelForCausalLM.from_models(target, str(tmp_path / "small"), draft_length=4)
    assert model.drafter.kept.tokens.tolist() == list(range(20))  # type: ignore[union-attr]
    ids = prompt()["ids"]
    assert model.generate(ids, **CALL).tolist() == said_by(target, ids, **CALL).tolist()
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    assert again.drafter.kept.tokens.tolist() == list(range(20))
    fewer = shrink_vocabulary(str(tmp_path / "small"), 6, text, tmp_path / "smaller", target)
    assert fewer["tokens"] == 6  # of those that are left
    config = AutoConfig.from_pretrained(tmp_path / "smaller")
    left = kept_tokens(config)
    assert left is not None and left.tolist() == [4, 5, 6, 12, 13, 19]  # the most frequent, ties to the lower id


@pytest.mark.parametrize("kind", ["eagle", "dflash", "dspark"])
def test_a_head_is_written(kind: str, tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    fields: dict[str, Any] = {"next_token": True, "markov": "vanilla", "markov_rank": 4} if kind == "dspark" else {}
    head = trained_head(target, 3) if kind == "eagle" else trained_block(target, steps=30, **fields)
    (save_eagle if kind == "eagle" else save_block)(head, tmp_path / "head")
    kept = torch.arange(20)
    found = shrink_vocabulary(str(tmp_path / "head"), 20, some_text(target), tmp_path / "small", target)
    assert found["tokens"] == 20
    assert json.loads((tmp_path / "small" / "config.json").read_text())[f"{KEY}_coverage"] == found["coverage"]
    spec = Eagle if kind == "eagle" else DFlash
    model = AssistedModelForCausalLM.from_models(target, spec(str(tmp_path / "small")), draft_length=4)
    made = model.drafter.head
    assert made.draft_tokens.tolist() == kept.tolist()
    states = torch.randn(1, 3, made.config.hidden_size)
    own, ours = head.logits(states, target), made.logits(states, target)
    torch.testing.assert_close(ours, own[..., kept].to(ours.dtype))
    for rows in (1, 3):
        inputs = prompt(rows)
        kwargs = CALL | {"attention_mask": inputs["attention_mask"]}
        require_plain(model, inputs["ids"], **kwargs)
    again = shrunk_head(made, torch.tensor([3, 7, 19]), target)
    assert again.draft_tokens.tolist() == [3, 7, 19]
    torch.testing.assert_close(again.logits(states, target), own[..., [3, 7, 19]].to(own.dtype))


def test_the_coverage_is_that_of_other_text() -> None:
    text = Text(np.array([1, 1, 2], dtype=np.int32), np.array([1, 2, 3, 4], dtype=np.int32), "")
    assert coverage(text, torch.tensor([1, 2])) == 0.5


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    text = some_text(target)
    half_right(target).save_pretrained(tmp_path / "draft")
    save_eagle(trained_head(target, 1, steps=1), tmp_path / "eagle-1")
    save_mtp(trained_mtp(target, steps=1), tmp_path / "mtp")
    for draft, tokens, said in (
        ("eagle-1", 20, "predicts tokens with the target's output layer"),
        ("mtp", 20, "no place for a reduced vocabulary"),
        ("draft", 0, "tokens: 0 is not between 1 and"),
        ("draft", target.config.vocab_size, "is not between 1 and"),
    ):
        with pytest.raises(ValueError, match=said):
            shrink_vocabulary(str(tmp_path / draft), tokens, text, tmp_path / "out", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ValueError, match=r"out: .* is not empty"):
        shrink_vocabulary(str(tmp_path / "draft"), 20, text, tmp_path / "full", target)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for name in range(40):
        (source / f"{name}.py").write_text(f"def mean{name}(values):\n    return sum(values) / len(values)\n" * 20)
    given = ["shrink-vocabulary", "zoo:draft", "--target", "zoo:target", "--tokens", "64", "--text", str(source)]
    assert main([*given, "--out", str(tmp_path / "small"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 64 and found["of"] == 4096 and 0.5 < found["coverage"] <= 1
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=found["folder"], draft_length=4)
    ids = model.tokenizer("def mean(values):\n    return sum", return_tensors="pt").input_ids
    plain = model.generate(ids, max_new_tokens=24, do_sample=False, assisted=False)
    assert model.generate(ids, max_new_tokens=24, do_sample=False).tolist() == plain.tolist()
