"""PARD drafts: what they read and propose, how they are recognized, and their training."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from alone import drafts_of
from architectures import build, half_right, random_ids
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, require_plain, said_by, tokenizer
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM, Combined, DraftModel, DraftTree, Merged, Pard, Suffix
from assisted.engine.runner import CachedModel
from assisted.methods import Target, parse
from assisted.methods.draft_model.pard import TOKENS, PardDrafter, PardDrafting
from assisted.methods.draft_model.recurrent import RecurrentDrafter
from assisted.methods.draft_model.train import PardSettings, PardTraining
from assisted.methods.draft_model.tree import TreeDrafter
from assisted.methods.other_tokenizer.draft import TranslatedDrafter
from assisted.methods.shared.training.masks import rows_of, seen_by

MASK = 7
SOME = ["llama", "gpt2", "gemma2", "bloom", "llama4"]  # also models of 2-D masks, and windows

pytestmark = pytest.mark.usefixtures("invariants")


def draft_of(target: Any, noise: float | None = None, **fields: Any) -> Any:
    """A half-right model that says it was trained for parallel drafting."""
    draft = half_right(target, noise=noise)
    draft.config.update(fields or {"spd_type": "pard", "pard_token": MASK})
    return draft


def pair(name: str = "llama", draft_length: Any = 4, **kwargs: Any) -> tuple[Any, Any, AssistedModelForCausalLM]:
    target = build(BY_NAME[name])
    draft = draft_of(target)
    spec = Pard(draft, **kwargs)
    return target, draft, AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=draft_length)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_a_draft_is_what_masks_after_the_text_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round of a ragged batch: the whole text and the masks, read by the draft alone, give the same tokens."""
    _, draft, model = pair(name)
    seen, inputs = drafts_of(monkeypatch, PardDrafting), prompt(rows=3)
    mask = inputs["attention_mask"]
    with no_fallback():
        model.generate(inputs["ids"], attention_mask=mask, **CALL | {"eos_token_id": ENDS})
    assert len(seen) > 5
    for rows, unfinished, proposed, known in seen:
        for row in unfinished:
            text, hidden = rows[row], int((mask[row] == 0).sum())
            ids = torch.tensor([[*text[hidden:], *[MASK] * (proposed.width - 1)]])
            alone = draft(ids).logits[0, -proposed.width :]
            assert proposed.tokens[row].tolist() == alone.argmax(-1).tolist()
            if name not in ("bloom", "llama4"):  # right-aligned rows have further padding
                assert known[row] == len(text)


def test_one_forward_pass_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model = pair()
    widths: list[int] = []
    ids, call = prompt()["ids"], CachedModel.__call__
    model.generate(ids, **CALL)  # at first, faster forms of the models are compared with the models
    seen = drafts_of(monkeypatch, PardDrafting)

    def counted(self: CachedModel, ids: Any, draft: Any = None, used: Any = None) -> Any:
        if draft is None:  # not the target
            widths.append(ids.shape[1])
        return call(self, ids, draft, used)

    monkeypatch.setattr(CachedModel, "__call__", counted)
    model.generate(ids, **CALL)
    lengths = [ids.shape[1], *(len(rows[0]) for rows, *_ in seen)]
    new = [after - before for before, after in pairwise(lengths)]
    assert widths == [count + draft.width - 1 for count, (_, _, draft, _) in zip(new, seen, strict=True)]


def test_the_most_tokens_are_those_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["llama"])
    for fields, tokens, most in (({}, None, TOKENS), ({"pard_tokens": 3}, None, 3), ({"pard_tokens": 3}, 5, 5)):
        draft = draft_of(target, spd_type="pard", pard_token=MASK, **fields)
        model = AssistedModelForCausalLM.from_models(target, draft=Pard(draft, tokens=tokens), draft_length=12)
        with monkeypatch.context() as patch:
            seen = drafts_of(patch, PardDrafting)
            model.generate(prompt()["ids"], **CALL | {"max_new_tokens": 30})
        assert max(draft.width for _, _, draft, _ in seen) == most


def test_turns_of_a_session_and_short_contexts() -> None:
    target, _, model = pair()
    ids = prompt()["ids"]
    session, plain = model.session(), ids
    for _ in range(3):
        with no_fallback():
            ours = model.generate(plain, past_key_values=session, **CALL)
        assert ours.tolist() == said_by(target, plain, **CALL).tolist()
        plain = torch.cat([ours, random_ids(target, 1, 3, seed=9)], 1)
    few = build(BY_NAME["gpt2"], n_positions=24)  # learned positions: there is nothing after the last one
    short = AssistedModelForCausalLM.from_models(few, draft=draft_of(few, noise=0.3), draft_length=8)
    require_plain(short, ids, **CALL | {"max_new_tokens": 12})


@pytest.mark.parametrize("several", [Combined, Merged])
def test_in_a_list(several: Any) -> None:
    target = build(BY_NAME["llama"])
    spec = several((draft_of(target), Suffix(), half_right(target, 2)))
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=4)
    inputs = prompt(rows=2)
    kwargs = CALL | {"attention_mask": inputs["attention_mask"]}
    assert model.generate(inputs["ids"], **kwargs).tolist() == said_by(target, inputs["ids"], **kwargs).tolist()
    assert model.report is not None and model.report.accepted > 0


# ---- recognized, read and saved


@pytest.mark.parametrize(
    "fields",
    [{"pard_token": MASK}, {"ptd_token_id": MASK}, {"spd_type": "pard", "mask_token_id": MASK}],
    ids=lambda fields: "+".join(fields),
)
def test_a_folder_is_recognized_by_its_config(fields: dict[str, Any], tmp_path: Any) -> None:
    target = build(BY_NAME["llama"])
    draft_of(target, **fields).save_pretrained(tmp_path)
    for given in (str(tmp_path), f"pard:{tmp_path}", Pard(str(tmp_path), quantization="int8")):
        model = AssistedModelForCausalLM.from_models(target, draft=given, draft_length=4)
        assert isinstance(model.drafter, PardDrafter) and model.drafter.mask == MASK
        ids = prompt()["ids"]
        assert model.generate(ids, **CALL).tolist() == said_by(target, ids, **CALL).tolist()


def test_other_models_are_drafted_with_as_before() -> None:
    target = build(BY_NAME["llama"])
    named = draft_of(target, mask_token_id=MASK)  # as many models have, for other reasons
    assert not isinstance(DraftModel(named).load(target_of(target)), PardDrafter)
    assert isinstance(Pard(named).load(target_of(target)), PardDrafter)
    assert isinstance(DraftTree(draft_of(target)).load(target_of(target)), TreeDrafter)


def target_of(model: Any, with_tokenizer: bool = False) -> Any:
    return Target(model, tokenizer() if with_tokenizer else None)


def test_what_cannot_draft_in_parallel_is_refused() -> None:
    target = build(BY_NAME["llama"])
    size = target.config.vocab_size
    for fields, said in (
        ({"spd_type": "pard"}, "draft: the config names no mask token"),
        ({"pard_token": size}, f"draft: pard_token: {size} is not a token"),
        ({"pard_token": "7"}, "draft: pard_token: '7' is not a token"),
        ({"pard_token": True}, "draft: pard_token: True is not a token"),
        ({"pard_token": MASK, "pard_tokens": 0}, "draft: pard_tokens: 0 is not a number"),
    ):
        with pytest.raises(ValueError, match=said):
            AssistedModelForCausalLM.from_models(target, draft=draft_of(target, **fields))
    with pytest.raises(ValueError, match="names no mask token"):
        Pard(half_right(target)).load(target_of(target))
    with pytest.raises(ValueError, match="tokens: 0 is not possible"):
        Pard("./a", tokens=0)
    with pytest.raises(ValueError, match="'pard' does not name a model"):
        parse("pard")
    recurrent = build(BY_NAME["mamba2"]) if "mamba2" in BY_NAME else None
    if recurrent is not None:
        recurrent.config.update({"pard_token": MASK})
        assert isinstance(DraftModel(recurrent).load(target_of(target)), RecurrentDrafter)
        with pytest.raises(ValueError, match="recurrent states"):
            Pard(recurrent).load(target_of(target))


def test_a_draft_with_another_tokenizer_is_translated() -> None:
    target = build(BY_NAME["llama"])
    other = tokenizer(first="A")
    assert isinstance(DraftModel(draft_of(target), tokenizer=other).load(target_of(target, True)), TranslatedDrafter)
    with pytest.raises(ValueError, match="another tokenizer"):
        Pard(draft_of(target), tokenizer=other).load(target_of(target, True))


# ---- training


def test_rows_see_the_text_up_to_their_anchor_and_the_masks_before_them() -> None:
    anchors, depths = torch.tensor([0, 1, 2, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert seen_by(anchors, depths).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]


def test_rows_are_dropped_from_the_deepest_first() -> None:
    torch.manual_seed(0)
    anchors, depths = rows_of(103, 4, 0.5, 0.2, "cpu")
    by_depth = [set(anchors[depths == depth].tolist()) for depth in range(4)]
    assert [len(rows) for rows in by_depth] == [103, 50, 25, 20]
    assert by_depth[0] > by_depth[1] > by_depth[2] > by_depth[3]
    assert int((anchors + depths).max()) < 103
    with pytest.raises(ValueError, match="context: 4 tokens are too few"):
        rows_of(4, 4, 0.5, 0.2, "cpu")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_training_sees_what_drafting_reads(name: str) -> None:
    """The logits of every row in training are those after its text and masks, read alone."""
    target = build(BY_NAME[name])
    training = trained(target, tokens=3)
    ids = random_ids(target, 2, 24, seed=5)
    anchors, depths = rows_of(24, 3, 0.7, 0.2, "cpu")
    _, drafted = training.parallel(ids, anchors, depths)
    for row in range(2):
        for column in range(0, len(anchors), 3):
            read = torch.cat([ids[row, : anchors[column] + 1], torch.full((int(depths[column]),), MASK)])
            alone = training.student(read[None]).logits[0, -1]
            assert torch.allclose(drafted[row, column], alone, atol=1e-4)


@torch.no_grad()
def test_a_row_learns_what_the_target_says_after_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a draft that says in every row what the target says there is that of the target with itself."""
    training, ids = trained(build(BY_NAME["llama"]), tokens=3), random_ids(build(BY_NAME["llama"]), 2, 24, seed=5)
    logits = 4 * torch.randn(2, 24, 90, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(
        training, "parallel", lambda ids, anchors, depths: (logits, logits[:, anchors + depths + training.off])
    )
    losses = []
    for training.off in (0, -1):
        torch.manual_seed(0)
        losses.append(float(training.loss(ids, 0)))
    assert losses[0] < 0.1 * losses[1]


def trained(target: Any, **settings: Any) -> PardTraining:
    about = PardSettings(layers=1, mask_token=settings.pop("mask_token", MASK), **settings)
    return PardTraining(target, tokenizer(), about, student=half_right(target))


def test_what_was_trained_drafts_in_parallel(tmp_path: Any) -> None:
    target = build(BY_NAME["llama"])
    training = trained(target, tokens=3)
    assert len(training.acceptance(random_ids(target, 2, 24, seed=5))) == 3
    training.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (saved.config.spd_type, saved.config.pard_token, saved.config.pard_tokens) == ("pard", MASK, 3)
    model = AssistedModelForCausalLM.from_models(target, draft=str(tmp_path), tokenizer=tokenizer(), draft_length=8)
    assert isinstance(model.drafter, PardDrafter) and model.drafter.tokens == 3


def test_settings_of_a_training_are_checked() -> None:
    target = build(BY_NAME["llama"])
    for fields, said in (
        ({"tokens": 0}, "tokens: 0"),
        ({"keep": 0.0}, "keep: 0.0 is not a share"),
        ({"keep_least": 1.5}, "keep_least: 1.5"),
    ):
        with pytest.raises(ValueError, match=said):
            PardSettings(layers=1, **fields)
    with pytest.raises(ValueError, match="mask_token: 10000 is not a token"):
        trained(target, mask_token=10000)
    with pytest.raises(ValueError, match="takes no 4-D masks"):
        trained(build(BY_NAME["bloom"]))
    assert trained(target, mask_token=None).mask == tokenizer().pad_token_id
    wide = copy.copy(tokenizer(entries=50))
    about = PardSettings(layers=1)
    assert PardTraining(target, wide, about, student=half_right(target)).mask == 50
