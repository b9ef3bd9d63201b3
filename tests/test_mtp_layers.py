"""Several MTP layers in turn, against the definition in the paper of DeepSeek-V3 (2412.19437, section 2.2), written out."""

from __future__ import annotations

import functools
import json
import shutil
from typing import Any

import pytest
import torch
from alone import Alone, one_and_four, require_chains, rows_of, watched
from architectures import ARCHITECTURES, RECURRENT, build
from eagle_heads import features_of
from mtp_heads import random_layers, random_mtp, trained_layers
from pairs import CALL, ENDS, ROUNDING, no_fallback, require_plain
from safetensors.torch import load_file, save_file
from test_sampling import require_distribution, tiny
from test_session import plain_talk, talked, turns
from transformers import DynamicCache, cache_utils, modeling_layers

from assisted import MTP, AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.lengths.rates import Rates
from assisted.methods.eagle import draft as eagle
from assisted.methods.mtp.draft import MTPDrafter, MTPDrafting
from assisted.methods.mtp.head import MTPHead, SequentialMTP, first_tensors, load_mtp, save_mtp, without_first
from assisted.methods.shared.runner import HeadRunner

BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *RECURRENT]}
FILE = "model.safetensors"
pytestmark = pytest.mark.usefixtures("invariants")


def assisted(target: Any, head: Any, tree: bool | None = None, draft_length: Any = 5) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(target, draft=MTP(head, tree=tree), draft_length=draft_length)


class Definition(Alone):
    """What the layers say after a text, by the paper's equations: a loop over modules, with no cache and no batch.

    Module k reads, in column i, the state h^{k-1}_i of the module before and the token i + k. Beyond the last module, that one
    reads its own last state.
    """

    def __init__(self, target: Any, layers: SequentialMTP):
        self.target, self.layers = target, list(layers.layers)

    @functools.cache  # noqa: B019
    def features(self, *text: int) -> torch.Tensor:
        return features_of(self.target, self.layers[-1], torch.tensor([text]))[:, :-1]

    @torch.no_grad()
    def states(self, tokens: list[int], columns: int, features: torch.Tensor) -> list[torch.Tensor]:
        """h^1, h^2, .. [1, columns, H], as far as there are tokens."""
        found, state = [], features
        for k, layer in enumerate(self.layers[: len(tokens) - columns], 1):
            state = layer(layer.embed(torch.tensor([tokens[k : k + columns]]), self.target), state)
            found.append(state)
        return found

    @torch.no_grad()
    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[V] after the committed text and a drafted path."""
        last, columns, tokens = self.layers[-1], len(text) - 1, text + path
        features = self.features(*text)
        found = self.states(tokens, columns, features)
        read, made, number = [features, *found][len(found) - 1], found[-1], len(self.layers)
        for column in range(columns, len(tokens) - number):
            read = torch.cat([read, made[:, -1:]], 1)
            made = last(last.embed(torch.tensor([tokens[number : column + 1 + number]]), self.target), read)
        return self.target.get_output_embeddings()(made[0, -1])

    def score(self, text: list[int], path: tuple[int, ...]) -> float:
        """Log-probability of a path."""
        steps = [self.logits(text, list(path[:depth])).log_softmax(-1)[token] for depth, token in enumerate(path)]
        return float(sum(steps))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("batch", [0, 1], ids=["one row", "padded rows"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5"])
def test_chains_are_those_of_the_definition(name, batch, number):
    """Over several rounds with rejections, and beyond the last layer."""
    target = build(BY_NAME[name])
    layers, inputs = trained_layers(target, number), one_and_four(target)[batch]
    model, ends = assisted(target, layers, tree=False), {"eos_token_id": ENDS if batch else None}
    ours = require_chains(Definition(target, layers), model, inputs, **ends)
    assert ours.tolist() == target.generate(**inputs, **(CALL | ends)).tolist()
    assert model.report.accepted < model.report.drafted
    assert model.report.acceptance_by_position[1] > 0.5


@pytest.mark.parametrize("batch", [0, 1], ids=["one row", "padded rows"])
def test_trees_are_scored_by_the_definition(batch, monkeypatch):
    target = build(BY_NAME["llama"])
    layers = trained_layers(target, 3)
    definition, inputs = Definition(target, layers), one_and_four(target)[batch]
    depths: set[int] = set()

    def look(text: Any, draft: Draft, budget: int) -> None:
        for row, committed in rows_of(text, inputs["attention_mask"]):
            drafted = [tuple(draft.prefix(row, node)) for node in range(int(draft.lengths[row]))]
            scores = [definition.score(committed, path) for path in drafted]
            assert scores == pytest.approx(sorted(scores, reverse=True), abs=ROUNDING)
            depths.update(map(len, drafted))
            best = int(definition.logits(committed, []).argmax())
            assert drafted[0] == (best,)

    monkeypatch.setattr(Rates, "learn", lambda *args: None)  # the head is taken at its word
    model = assisted(target, layers, tree=True)
    with watched(monkeypatch, look) as counted, no_fallback():
        model.generate(**inputs, **(CALL | {"eos_token_id": ENDS if batch else None, "max_new_tokens": 14}))
    assert counted[0] > 1
    assert model.report.accepted > 3
    assert max(depths) > 3


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_sampling_with_untrained_layers(tree):
    target = tiny(0, layers=2)
    spec = MTP(random_layers(target, 2), tree=tree, nodes=3)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=2 if tree else 3)
    require_distribution(model, seed=3)


@pytest.mark.parametrize(
    ("name", "number"), [("glm4_moe", 2), ("glm4_moe", 3), ("deepseek_v3", 2), ("deepseek_v3", 3), ("mellum", 1)]
)
def test_the_first_draft_is_that_of_transformers(name, number):
    """Of its own modules for `use_mtp`, which draft a token with each layer. Mellum's has a sliding window."""
    if not hasattr(modeling_layers, "MtpModel") or name not in BY_NAME:
        pytest.skip("not in this version of transformers")
    target = build(BY_NAME[name])
    target.config.num_mtp_layers = number
    layers = random_layers(target, number) if number > 1 else random_mtp(target)
    theirs = modeling_layers.MtpModel(target, number).eval()
    places = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fuse": "eh_proj", "end_norm": "post_norm"}
    for k, tensors in enumerate(layers.tensors() if number > 1 else [layers.tensors()]):
        named = {"mtp_block." + key[6:]: tensor for key, tensor in tensors.items() if key.startswith("layer.")}
        named |= {f"{places[key[:-7]]}.weight": tensors[key] for key in tensors if not key.startswith("layer.")}
        theirs.layers[k].load_state_dict(named)
    model, drafts = assisted(target, layers, tree=False, draft_length=number), []
    ids = one_and_four(target)[0]["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        with watched(patch, lambda text, draft, budget: drafts.append((text.ids.clone(), draft.tokens))), no_fallback():
            model.generate(ids, max_new_tokens=number + 3, do_sample=False, eos_token_id=None)
    text, drafted = drafts[0]
    cache, positions = cache_utils.MtpCache(config=target.config.get_mtp_config()), torch.arange(1, ids.shape[1] + 1)
    with torch.no_grad():
        states = target.model(ids).last_hidden_state
        made = theirs(text[:, 1 : ids.shape[1] + 1], states, None, positions[None], cache)
        assert drafted.tolist() == made[0].tolist()
        if number == 1:  # the step itself, as one token says little
            found = layers(layers.embed(text[:, 1 : ids.shape[1] + 1], target), states, positions[None])
            assert torch.allclose(layers.logits(found[:, -1:], target), made[1], atol=1e-5)


def differences(tree: bool) -> list[float]:
    """After each round: how far the keys and values of committed tokens are from what the definition gives."""
    target = build(BY_NAME["llama"])
    layers = trained_layers(target, 3)
    model, found = assisted(target, layers, tree), []
    definition, propose = Definition(target, layers), MTPDrafting.propose

    def compared(self: MTPDrafting, text: Any, budget: int) -> Draft:
        draft = propose(self, text, budget)
        ids = text.ids[0, : text.lengths[0]].tolist()
        features = features_of(target, layers, text.ids[:, : text.lengths[0]])[:, :-1]
        assert self.runner is not None
        assert self.runner.cache.known == [len(ids) - 1]
        stores = self.runner.cache.stores
        state = features
        for k, layer in enumerate(definition.layers, 1):
            cache, columns = DynamicCache(), len(ids) - k
            positions = torch.arange(columns)[None] + k - 1  # counted from another token, as rotary embeddings allow
            tokens = torch.tensor([ids[k:]])
            mask = torch.ones(1, 1, columns, columns, dtype=torch.bool).tril()
            state = layer(layer.embed(tokens, target), state[:, :columns], positions, mask, cache)
            kept = cache.layers[k - 1]
            for ours, theirs in zip(stores[2 * k - 2 : 2 * k], (kept.keys, kept.values), strict=True):
                found.append(float((ours[:, :, k - 1 : len(ids) - 1] - theirs).abs().max()))
        return draft

    with pytest.MonkeyPatch.context() as patch, no_fallback():
        patch.setattr(MTPDrafting, "propose", compared)
        model.generate(**one_and_four(target)[0], **CALL)
    assert 0 < model.report.accepted < model.report.drafted
    return found


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_kept_columns_are_those_of_the_definition(tree):
    found = differences(tree)
    assert len(found) > 3 * 6
    assert max(found) < 1e-4


@torch.no_grad()
def test_layers_after_the_first_read_states_of_their_own() -> None:
    """Only if all layers read is the text handed on from one to the next."""
    layers = random_layers(build(BY_NAME["llama"]))
    size, drawn = layers.config.hidden_size, torch.Generator().manual_seed(0)
    words, states = (torch.randn(1, 5, n * size, generator=drawn) for n in (1, 2))
    sees = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    made = [
        layer(words, own, None, without_first(sees, at), None)
        for at, (layer, own) in enumerate(zip(layers.layers[1:], states.split(size, -1), strict=True), 1)
    ]
    assert torch.equal(layers(words, states), made[0])
    layers.layers[1].forward = lambda *given: made[0]  # what the last one then reads is still its own
    read: list[torch.Tensor] = []
    last = layers.layers[2].forward
    layers.layers[2].forward = lambda *given: read.append(given[1]) or last(*given)
    layers(words, states)
    assert torch.equal(read[0], states[..., size:])


@torch.no_grad()
def test_columns_read_one_by_one_or_at_once():
    """Also rows of different lengths, in a cache that is wider than the text."""
    target = build(BY_NAME["llama"])
    layers = random_layers(target, 3)
    tokens, features = torch.randint(3, 96, (2, 9)), torch.randn(2, 9, 32)

    def runner() -> HeadRunner:
        return HeadRunner(layers, target, SlotCache(2, 64), torch.zeros(2, 1, dtype=torch.int64))

    whole, parts = runner(), runner()
    expected = whole.read(tokens, layers.fuse(features), [9, 7])
    parts.read(tokens[:, :2], layers.fuse(features[:, :2]), [2, 2])
    parts.read(tokens[:, 2:5], layers.fuse(features[:, 2:5]), [3, 1])
    late = torch.stack([torch.arange(5, 9), torch.arange(3, 7)])
    found = parts.read(
        tokens.gather(1, late), layers.fuse(features.gather(1, late[:, :, None].expand(-1, -1, 32))), [4, 4]
    )
    assert expected.shape == (2, 2 * 32)
    assert torch.allclose(found, expected, atol=ROUNDING)


# ---- keys and values


# ---- sessions, windows, captured passes


@pytest.mark.parametrize("tree", [True, False])
def test_a_session_goes_on_as_if_the_whole_text_had_been_read(tree, monkeypatch):
    monkeypatch.setattr(eagle, "learn", lambda *args: None)  # or the second call would draft other trees
    target = build(BY_NAME["llama"])
    spec = MTP(trained_layers(target), tree=tree, nodes=6)
    model = AssistedModelForCausalLM.from_models(target, spec, draft_length=4, fast="eager")
    session, ids = model.session(), turns(1)[0][:, :0]
    for turn in turns(6):
        prompt = torch.cat([ids, turn], 1)
        anew, report = model.generate(prompt, **CALL), model.report
        ids = model.generate(prompt, past_key_values=session, **CALL)
        assert ids.tolist() == anew.tolist()
        assert (model.report.drafted, model.report.accepted) == (report.drafted, report.accepted)


def test_rows_of_a_session():
    target = build(BY_NAME["llama"])
    model = assisted(target, trained_layers(target), tree=False)
    added = turns(2, rows=3)
    assert talked(model, model.session(), added) == plain_talk(target, added)
    assert model.totals.accepted > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_captured_passes_of_each_width():
    """In compiled code, layers that do not run in a step are left out: every width of the states has code of its own."""
    target, accepted = build(BY_NAME["llama"]), []
    inputs = one_and_four(target)[0]
    for fast in ("eager", "compile"):
        spec = MTP(trained_layers(target, 2), tree=False)
        model = AssistedModelForCausalLM.from_models(target, spec, draft_length=4, fast=fast)
        for _ in range(2):
            ours = model.generate(**inputs, **CALL)
        assert ours.tolist() == target.generate(**inputs, **CALL).tolist()
        accepted.append(model.report.accepted)
    assert accepted[0] == accepted[1] > 0
    assert model.drafter.graphs.reason is None
    assert model.drafter.graphs.replays > 0


# ---- checkpoints


def test_layers_share_the_targets_output_embedding():
    target = build(BY_NAME["llama"])
    own = MTPHead(target, {**first_tensors(target), "output.weight": torch.randn(96, 32)})
    for wrong in ([random_mtp(target)], [random_mtp(target), own]):
        with pytest.raises(ValueError, match="layers: expected two or more MTP layers"):
            SequentialMTP(wrong)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_saved_with_the_pair(name, number, tmp_path):
    """From a target's checkpoint that contains the layers, as published, and from a pair."""
    target = build(BY_NAME[name])
    layers = trained_layers(target, number)
    target.save_pretrained(tmp_path / "whole")
    save_mtp(layers, tmp_path / "head")
    if name == "deepseek_v3":
        weights = {n: t for folder in ("whole", "head") for n, t in load_file(tmp_path / folder / FILE).items()}
        save_file(weights, tmp_path / "whole" / FILE, {"format": "pt"})
        draft = "mtp"
    else:
        draft = f"mtp:{tmp_path / 'head'}"
    model = AssistedModelForCausalLM.from_pretrained(tmp_path / "whole", draft=draft, draft_length=4)
    inputs = one_and_four(target)[0]
    ours = require_plain(model, **inputs, **CALL)
    assert model.report.acceptance_by_position[1] > 0.5
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    assert isinstance(again.drafter, MTPDrafter)
    found = again.drafter.head.tensors()
    assert len(found) == number
    for ours, theirs in zip(found, layers.tensors(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again.generate(**inputs, **CALL)
    assert again.report.accepted == model.report.accepted


def test_a_layer_that_was_lost_is_an_error(tmp_path):
    """One tensor, a whole layer in the middle, and a last one that the config still announces."""
    target = build(BY_NAME["deepseek_v3"])
    layers = target.config.num_hidden_layers
    save_mtp(random_layers(target, 3), tmp_path / "head")
    whole = load_file(tmp_path / "head" / FILE)
    for lost in (
        f"model.layers.{layers + 1}.enorm.weight",
        f"model.layers.{layers + 1}.",
        f"model.layers.{layers + 2}.",
    ):
        shutil.copytree(tmp_path / "head", tmp_path / "less", dirs_exist_ok=True)
        less = {name: tensor for name, tensor in whole.items() if not name.startswith(lost)}
        save_file(less, tmp_path / "less" / FILE, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks tensor {lost}"):
            load_mtp(tmp_path / "less", target)
    fields = json.loads((tmp_path / "less" / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 3
    (tmp_path / "less" / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 2}))
    assert len(load_mtp(tmp_path / "less", target).layers) == 2
    (tmp_path / "less" / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 10**9}))
    assert len(load_mtp(tmp_path / "less", target).layers) == 2
