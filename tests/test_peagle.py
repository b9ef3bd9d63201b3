"""P-EAGLE heads: chains by one forward pass, and their checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from alone import drafts_of
from architectures import build, random_ids
from covering import in_turns
from eagle_heads import features_of, random_head, written
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, require_plain
from safetensors.torch import load_file
from test_eagle_formats import EAGLE_3, SPECULATORS, eagle_3, noise, speculators, write

from assisted import AssistedModelForCausalLM, Eagle
from assisted.methods.eagle.draft import EagleDrafting
from assisted.methods.eagle.formats import load_eagle, save_eagle
from assisted.methods.eagle.train import EagleSettings, EagleTraining
from assisted.methods.shared.registry import kind_of
from assisted.methods.shared.runner import HeadRunner
from assisted.methods.shared.training.masks import rows_of

MASK = 7
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2, "own_embedding": True},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "draft_vocab_size": 40},
    "one norm": {"norm_before_fc": True, "layer": "qwen3"},
}

pytestmark = pytest.mark.usefixtures("invariants")


def parallel_head(target: Any, **fields: Any) -> Any:
    head = random_head(target, 3, mask_token_id=MASK, **fields)
    head.mask_hidden.data.normal_(generator=torch.Generator().manual_seed(5))
    return head


def pair(draft_length: Any = 4, **fields: Any) -> tuple[Any, Any, AssistedModelForCausalLM]:
    target = build(BY_NAME["llama"])
    head = parallel_head(target, **fields)
    return target, head, AssistedModelForCausalLM.from_models(target, draft=Eagle(head), draft_length=draft_length)


@torch.no_grad()
def alone(target: Any, head: Any, text: list[int], tokens: int) -> list[int]:
    """What the head says in one pass over a whole text and masks: true features for the text, `mask_hidden` for masks."""
    ids = torch.tensor([text])
    features = torch.cat([features_of(target, head, ids)[:, :-1], head.mask_hidden.expand(1, tokens - 1, -1)], 1)
    read = torch.cat([ids[:, 1:], torch.full((1, tokens - 1), head.config.mask_token_id)], 1)
    logits = head.over_all(head.logits(head(head.embed(read, target), head.fuse(features)), target))
    return logits[0, -tokens:].argmax(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_is_what_masks_after_the_text_say(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round of a ragged batch. The slots hold the text's columns, and no masks."""
    target, head, model = pair(**SHAPES[shape])
    seen = drafts_of(monkeypatch, EagleDrafting)
    inputs = prompt(rows=3)
    mask, kwargs = inputs["attention_mask"], CALL | {"eos_token_id": ENDS}
    require_plain(model, inputs["ids"], attention_mask=mask, **kwargs)
    assert len(seen) > 5
    for rows, unfinished, draft, known in seen:
        assert draft.parents is None and draft.width <= 4
        for row in unfinished:
            text = rows[row][int((mask[row] == 0).sum()) :]
            assert draft.tokens[row].tolist() == alone(target, head, text, draft.width)
            assert known[row] == len(rows[row]) - 1


def test_one_forward_pass_a_draft_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model = pair(draft_length=20, parallel_tokens=6)
    widths: list[int] = []
    call = HeadRunner.__call__

    def counted(self: HeadRunner, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        widths.append(tokens.shape[1])
        return call(self, tokens, states)

    monkeypatch.setattr(HeadRunner, "__call__", counted)
    model.generate(prompt()["ids"], **CALL | {"max_new_tokens": 40})
    assert model.report is not None
    assert len(widths) == model.report.target_passes - 1  # the last round has no room for a draft
    assert widths[0] == 5 and max(widths) > 5


@pytest.mark.parametrize(
    ("fields", "size"), in_turns([{}, {"mask_token_id": MASK}, {"draft_vocab_size": 40}], [100, 90])
)
def test_sampling_after_the_target_was_resized(fields: dict[str, Any], size: int) -> None:
    """Tokens that only the head has are never drafted, and it never drafts those that only the target has."""
    target = build(BY_NAME["llama"])
    draft = Eagle(random_head(target, 3, **fields), tree=False)
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
    target.resize_token_embeddings(size, mean_resizing=False)
    ids = random_ids(target, 2, 8, seed=1).clamp(max=80)
    for do_sample in (False, True):
        with no_fallback():
            model.generate(ids, **CALL | {"do_sample": do_sample})
        assert model.report is not None and model.report.drafted > 0


# ---- training


@torch.no_grad()
def test_training_sees_what_drafting_reads() -> None:
    """Columns of the text and masks after some of them, in one pass: the same as each draft by itself."""
    target = build(BY_NAME["llama"])
    training = EagleTraining(target, EagleSettings(parallel=3))
    head = training.student.eval()
    head.mask_hidden.normal_(generator=torch.Generator().manual_seed(5))
    ids = random_ids(target, 2, 14, seed=5)
    anchors, depths = rows_of(13, 3, 0.7, 0.2, "cpu")
    _, states = training.parallel(ids, anchors, depths)
    best = head.logits(states, target).argmax(-1)
    for row in range(2):
        for anchor, depth, token in zip(anchors.tolist(), depths.tolist(), best[row].tolist(), strict=True):
            assert alone(target, head, ids[row, : anchor + 2].tolist(), 3)[depth] == token


def test_what_was_trained_drafts_in_parallel() -> None:
    """After ragged acceptance, too: most drafts of a head that knows the text by heart are right."""
    target = build(BY_NAME["llama"])
    ids, _ = written(target)
    training = EagleTraining(target, EagleSettings(parallel=3, loss="kl"))
    optimizer = torch.optim.Adam(training.trained(), lr=5e-3)
    for step in range(150):
        optimizer.zero_grad()
        training.loss(ids, step).backward()
        optimizer.step()
    found = training.acceptance(ids)
    assert len(found) == 3 and found[2].greedy > 0.5
    model = AssistedModelForCausalLM.from_models(target, draft=Eagle(training.student.eval()), draft_length=4)
    inputs = random_ids(target, 4, 12, seed=4)
    mask = torch.ones_like(inputs)
    for row in range(4):
        mask[row, : 2 * row] = 0
    inputs = inputs.where(mask.bool(), 0)
    kwargs = CALL | {"attention_mask": mask}
    require_plain(model, inputs, **kwargs)
    assert model.report is not None and model.report.acceptance_by_position[1] > 0.2
    with pytest.raises(ValueError, match="parallel: an EAGLE-1 head"):
        EagleSettings(version=1, parallel=3)


# ---- checkpoints


def raw() -> dict[str, torch.Tensor]:
    return eagle_3() | {"mask_hidden": noise(1, 1, 96)}


def of_speculators() -> dict[str, torch.Tensor]:
    return speculators() | {"mask_hidden": noise(1, 1, 64)}


PEAGLE = SPECULATORS | {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": MASK,
    "embed_requires_grad": True,
}
del PEAGLE["norm_before_residual"]
CHECKPOINTS = {
    "eagle": (EAGLE_3 | {"mask_token_id": MASK, "parallel_tokens": 5}, raw),
    "speculators": (PEAGLE, of_speculators),
}


def test_the_layout_of_nemo_automodel(tmp_path: Any) -> None:
    """NVIDIA-NeMo/Automodel components/speculative/eagle/peagle_draft.py and draft_llama.py, 2026-08-22."""
    target = build(BY_NAME["llama"])
    given = eagle_3("model.layers.0.") | {"mask_hidden": noise(1, 1, 96)}
    for name in ("fc.weight", "norm.weight"):
        given[f"model.{name}"] = given.pop(name)
    fields = EAGLE_3 | {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 5}
    head = load_eagle(write(tmp_path / "nemo", fields | {"mask_token_id": MASK}, given), target)
    same = load_eagle(write(tmp_path / "eagle", CHECKPOINTS["eagle"][0], raw()), target)
    assert head.config == same.config
    assert all(torch.equal(same.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_read_and_written_again_without_loss(name: Any, tmp_path: Any) -> None:
    target = build(BY_NAME["llama"])
    fields, tensors = CHECKPOINTS[name][0], CHECKPOINTS[name][1]()
    given = write(tmp_path / "given", fields, tensors)
    assert kind_of(given) == "eagle"
    head = load_eagle(given, target)
    assert (head.config.mask_token_id, head.config.norm_before_residual) == (MASK, False)
    assert head.config.parallel_tokens == (5 if name == "eagle" else 8)
    save_eagle(head, tmp_path / "again", name, target)
    held = load_file(tmp_path / "again" / "model.safetensors")
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in tensors.items())
    assert load_eagle(tmp_path / "again", target).config == head.config
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    if name == "speculators":
        assert {key: written[key] for key in PEAGLE.keys() - {"transformer_layer_config"}} == {
            key: value for key, value in PEAGLE.items() if key != "transformer_layer_config"
        }
        assert written["speculators_config"]["algorithm"] == "peagle"


def test_broken_checkpoints_are_refused(tmp_path: Any) -> None:
    target = build(BY_NAME["llama"])
    fields, tensors = PEAGLE, of_speculators()
    without = {key: value for key, value in fields.items() if key != "mask_token_id"}
    for number, (given, held, said) in enumerate(
        (
            (without, tensors, r"config.json lacks mask_token_id"),
            (without | {"speculators_model_type": "eagle3"}, tensors, r"config.json lacks mask_token_id"),
            (fields, {k: v for k, v in tensors.items() if k != "mask_hidden"}, "lacks tensor mask_hidden"),
            (fields, tensors | {"mask_hidden": noise(1, 1, 32)}, r"mask_hidden of shape \[1, 1, 32\]"),
            (fields | {"mask_token_id": 96}, tensors, "mask_token_id: 96 is not a token"),
            (fields | {"parallel_tokens": 0}, tensors, "parallel_tokens: 0 is not a number"),
            (fields | {"mask_token_id": "7"}, tensors, "mask_token_id: '7' is not a token"),
        )
    ):
        with pytest.raises(ValueError, match=said):
            load_eagle(write(tmp_path / str(number), given, held), target)
    with pytest.raises(ValueError, match="tree: True is not possible"):
        AssistedModelForCausalLM.from_models(target, draft=Eagle(parallel_head(target), tree=True))
