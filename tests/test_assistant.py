"""Gemma 4 assistants: the module against transformers' class, and what they draft over the target's keys and values."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from alone import Alone, one_and_four, require_best_paths, require_chains
from architectures import ARCHITECTURES, build, random_ids
from assistant_heads import gemma4, keys_of, random_assistant, trained_assistant
from pairs import CALL, ENDS, ROUNDING, no_fallback, require_plain
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.generation.utils import _speculative_sampling

from assisted import Assistant, AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.recurrent import target_runner
from assisted.engine.traits import Traits
from assisted.loading.files import local_folder
from assisted.methods import METHODS, parse
from assisted.methods.assistant.draft import AssistantDrafter, AssistantDrafting, AssistantReader, Step
from assisted.methods.assistant.head import (
    AssistantHead,
    Keys,
    Source,
    fields_for,
    is_assistant,
    load_assistant,
    save_assistant,
    sources_of,
)
from assisted.methods.assistant.train import AssistantSettings, AssistantTraining
from assisted.methods.eagle import draft as eagle
from assisted.methods.shared import files, registry
from assisted.methods.shared.base import Room

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
FILE = "model.safetensors"

if "gemma4_assistant" not in CONFIG_MAPPING:
    pytest.skip("this version of transformers has no Gemma 4 assistants", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("invariants")


@functools.cache
def target(shared: int = 0) -> Any:
    return gemma4(shared)


def assisted(model: Any, head: Any = None, tree: bool | None = None, **options: Any) -> AssistedModelForCausalLM:
    spec = Assistant(trained_assistant(model) if head is None else head, tree=tree, **options)
    return AssistedModelForCausalLM.from_models(model, draft=spec, draft_length=4)


# ---- the module


@pytest.fixture
def constructible(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 asks an assistant, whose layers all share keys, which of its layers keeps them, and stops."""
    kind: Any = CONFIG_MAPPING["gemma4_text"]
    modes = kind.kv_sharing_modes.fget

    def patched(self: Any) -> list[str | None]:
        layers = self.num_hidden_layers
        return ["reuse"] * layers if self.num_kv_shared_layers == layers else modes(self)

    monkeypatch.setattr(kind, "kv_sharing_modes", property(patched))


def published(model: Any, centroids: bool = False, seed: int = 0) -> Any:
    """transformers' own class with random weights, for a target."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text = {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 4, "sliding_window": 8}
    text |= {
        "vocab_size": 96,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "head_dim": 8,
        "num_key_value_heads": 2,
    }
    text |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kind = CONFIG_MAPPING["gemma4_assistant"](
        text_config=CONFIG_MAPPING["gemma4_text"](**text),
        backbone_hidden_size=model.config.hidden_size,
        use_ordered_embeddings=centroids,
        num_centroids=12,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(kind, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(96))
            elif tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5)
    return made


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.usefixtures("constructible")
@torch.no_grad()
def test_steps_are_those_of_transformers_class(centroids):
    """Two steps over the same keys and values, within the window; the position is that of the newest token."""
    model = target()
    theirs = published(model, centroids)
    head = AssistantHead(model, theirs.config.to_dict(), theirs.state_dict())
    ids = random_ids(model, 2, 6)
    states, stores = keys_of(model, head, ids)
    keys, position = {kind: Keys(*both, None) for kind, both in stores.items()}, torch.tensor([[6], [6]])
    tokens, state = torch.tensor([[7], [8]]), states[:, -1:]
    for _ in range(2):
        read = head.embed(tokens, model)
        expected = theirs(
            inputs_embeds=torch.cat([read, state], -1), position_ids=position, shared_kv_states=dict(stores)
        )
        ended, state = head(read, state, position, keys)
        logits = head.logits(ended)
        assert torch.allclose(state, expected.last_hidden_state, atol=ROUNDING)
        if centroids:
            chosen = logits > -torch.inf
            assert chosen.sum(-1).eq(4 * 8).all()
            assert (expected.logits.masked_fill(~chosen, 0) - logits.masked_fill(~chosen, 0)).abs().max() < ROUNDING
            assert expected.logits[~chosen].max() < expected.logits[chosen].min()
        else:
            assert torch.allclose(logits, expected.logits, atol=ROUNDING)
        tokens = logits.argmax(-1)
    assert not torch.equal(head(read, state, position + 1, keys)[0], ended)


@pytest.mark.parametrize("shared", [0, 2, 4])
def test_keys_are_those_of_the_last_layers_that_keep_them(shared):
    found = sources_of(target(shared), ["full_attention", "sliding_attention"])
    assert found == {"sliding_attention": Source(2, 2, 8), "full_attention": Source(3, 2, 16)}
    with pytest.raises(ValueError, match="target: LlamaForCausalLM keeps no keys and values of a layer with sliding"):
        sources_of(build(BY_NAME["llama"]), ["sliding_attention"])


# ---- drafting


class Reference(Alone):
    """Of an assistant, which reads the target's keys and values."""

    def __init__(self, model: Any, head: AssistantHead, back: int = 0):
        self.model, self.head, self.back = model, head, back

    @functools.cache  # noqa: B019
    def known(self, *text: int) -> tuple[torch.Tensor, dict[str, Keys]]:
        """The last state, and the keys and values that the newest token sees."""
        head, known = self.head, len(text) - 1
        states, stores = keys_of(self.model, head, torch.tensor([text[:-1]]))
        keys = {}
        for kind, (key, value) in stores.items():
            window = head.config.window(kind)
            first = 0 if window is None else max(0, known - self.back - window + 1)
            keys[kind] = Keys(key[:, :, first:], value[:, :, first:], None)
        return states[:, -1:], keys

    @functools.cache  # noqa: B019
    @torch.no_grad()
    def read(self, text: tuple[int, ...], path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head makes of the last token, and its next state."""
        state, keys = self.known(*text)
        if path:
            _, state = self.read(text, path[:-1])
        token, position = torch.tensor([[[*text, *path][-1]]]), torch.tensor([[len(text) - 1 - self.back]])
        return self.head(self.head.embed(token, self.model), state, position, keys)

    @torch.no_grad()
    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[V] after the committed text and a drafted path."""
        return self.head.logits(self.read(tuple(text), tuple(path))[0])[0, 0]


@pytest.mark.parametrize(("shared", "batch", "position"), [(0, 1, "next"), (2, 1, "last"), (2, 0, "next")])
def test_chains_are_the_assistants_own(shared, batch, position):
    model = target(shared)
    head = trained_assistant(model, steps=30, unrolled=3, lr=5e-3)  # it goes by the state
    pair = assisted(model, head, tree=False, position=position)
    reference, call = Reference(model, head, int(position == "last")), {"max_new_tokens": 26}
    call |= {"eos_token_id": ENDS if batch else None}
    require_chains(reference, pair, one_and_four(model)[batch], AssistantDrafting, **call)
    assert pair.report.accepted < pair.report.drafted


@pytest.mark.parametrize("batch", [0, 1], ids=["one row", "padded rows"])
def test_trees_are_the_assistants_best_paths(batch):
    model = target()
    head = trained_assistant(model, unrolled=1)
    pair = AssistedModelForCausalLM.from_models(model, draft=Assistant(head, tree=True, nodes=12), draft_length=3)
    inputs, ends = one_and_four(model)[batch], ENDS if batch else None
    require_best_paths(Reference(model, head), pair, inputs, 4, AssistantDrafting, eos_token_id=ends)


@pytest.mark.parametrize(("shared", "trained", "tree"), [(0, False, True), (2, False, False), (2, True, True)])
def test_text_is_the_targets(shared, trained, tree):
    """One row, and a ragged batch whose rows end at different times."""
    model = target(shared)
    pair = assisted(model, trained_assistant(model) if trained else random_assistant(model, centroids=True), tree)
    for inputs, ends in zip(one_and_four(model), (None, ENDS), strict=True):
        call = CALL | {"eos_token_id": ends, "max_new_tokens": 30}
        require_plain(pair, **inputs, **call)
    assert pair.totals.drafted > 0
    assert not trained or pair.totals.accepted > 20


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_as_published_with_eyes_and_ears(kind):
    """AutoModelForCausalLM makes checkpoints of Gemma 4 models that read images, too, of which only the text part drafts."""
    own = target(2).config.to_dict()
    text = CONFIG_MAPPING[f"{kind}_text"]
    fields = {name: value for name, value in own.items() if name in {*text.__dataclass_fields__, "per_layer_config"}}
    config = CONFIG_MAPPING[kind](text_config=text(**fields).to_dict(), vision_config=None, audio_config=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert type(model).__name__.endswith("ForConditionalGeneration")
    pair = assisted(model, random_assistant(model), tree=False)
    for inputs in one_and_four(model):
        require_plain(pair, **inputs, **CALL)
    assert pair.totals.drafted > 0


@pytest.mark.parametrize("session", [False, True])
def test_continued_turns(session):
    """Nothing of the assistant's own outlives a call; a later turn reads what the target has."""
    model = target(2)
    pair = assisted(model, tree=False)
    past = pair.session() if session else DynamicCache(config=model.config)
    own, ids = DynamicCache(config=model.config), one_and_four(model)[0]["input_ids"]
    for turn in range(3):
        with no_fallback():
            ours = pair.generate(ids, past_key_values=past, **CALL)
        assert ours.tolist() == model.generate(ids, past_key_values=own, **CALL).tolist()
        ids = torch.cat([ours, random_ids(model, 1, 5, seed=turn)], 1)
    assert pair.totals.accepted > 0


def test_the_target_and_its_slots_are_left_alone():
    model, read = target(), []
    pair = assisted(model, tree=False)
    propose = AssistantDrafting.propose

    def looked(self: AssistantDrafting, text: Any, budget: int) -> Draft:
        cache = self.call.target.cache
        before = [store.clone() for store in cache.stores], list(cache.lengths)
        draft = propose(self, text, budget)
        assert all(map(torch.equal, cache.stores, before[0])) and cache.lengths == before[1]
        read.append(draft.width)
        return draft

    with pytest.MonkeyPatch.context() as patch, no_fallback():
        patch.setattr(AssistantDrafting, "propose", looked)
        pair.generate(**one_and_four(model)[1], **CALL)
    assert sum(read) > 4


# ---- sampling


P, Q = torch.tensor([0.30, 0.40, 0.20, 0.10]), torch.tensor([0.5, 0.3, 0.1, 0.1])
TIMES = 2_000


def shares(drafts: torch.Tensor) -> torch.Tensor:
    """How often transformers' own rule returns each token first, for these drafts of one token."""
    found = torch.zeros(4)
    for token in drafts.tolist():
        ids, logits = torch.tensor([[0, token]]), torch.stack([P, P]).log()[None]
        found[_speculative_sampling(ids, Q.log()[None, None], 1, logits)[0][0, 0]] += 1
    return found / len(drafts)


def test_transformers_rule_needs_drawn_drafts():
    """transformers 5.23 drafts argmax tokens with an assistant of Gemma 4 and hands their logits to this function. 5
    standard errors are 0.056."""
    torch.manual_seed(0)
    argmax = shares(torch.full((TIMES,), int(Q.argmax())))
    # accepted: min(1, p/q) = 0.6 of the time; else from max(p - q, 0), which is (0, .5, .5, 0)
    assert (argmax - torch.tensor([0.6, 0.2, 0.2, 0.0])).abs().max() < 0.056
    assert (argmax - P).abs().max() > 0.25
    drawn = shares(torch.multinomial(Q, TIMES, replacement=True))
    assert (drawn - P).abs().max() < 0.056


def test_an_assistant_that_is_never_right_is_reported(monkeypatch):
    monkeypatch.setattr(eagle, "ENOUGH", 10)
    model = target()
    good, bad = assisted(model, tree=False), assisted(model, random_assistant(model), tree=False)
    for pair in (good, bad):
        pair.generate(**one_and_four(model)[0], **(CALL | {"max_new_tokens": 30}))
    assert good.report.warnings == ()
    (said,) = bad.report.warnings
    assert "hardly ever accepted" in said and "position='last'" in said


# ---- checkpoints


@pytest.mark.usefixtures("constructible")
def test_transformers_model_is_a_draft(tmp_path):
    model = target()
    theirs = published(model)
    theirs.save_pretrained(tmp_path / "published")
    inputs = one_and_four(model)[0]
    expected = model.generate(**inputs, **CALL).tolist()
    for draft in (theirs, str(tmp_path / "published"), f"assistant:{tmp_path / 'published'}", Assistant(theirs)):
        pair = AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=3)
        assert isinstance(pair.drafter, AssistantDrafter)
        with no_fallback():
            assert pair.generate(**inputs, **CALL).tolist() == expected
        assert pair.report.drafted > 0
        assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in pair.drafter.head.state_dict().items())


def test_a_hub_id_that_is_not_here_yet(stored, monkeypatch):
    """Its config.json is fetched to see what it is."""
    cached: dict[str, Any] = {}

    def downloaded(repository: str, **options: Any) -> str:
        assert repository == "org/assistant"
        cached.setdefault("asked", options.get("allow_patterns"))
        return str(stored)

    monkeypatch.setattr(files, "snapshot_download", downloaded)
    monkeypatch.setattr(
        registry, "local_folder", lambda path: stored if path == "org/assistant" and cached else local_folder(path)
    )
    pair = AssistedModelForCausalLM.from_models(target(), draft="org/assistant", draft_length=3)
    assert pair.spec == Assistant("org/assistant") and isinstance(pair.drafter, AssistantDrafter)
    assert cached["asked"] == ["config.json"]


@pytest.fixture
def stored(tmp_path):
    save_assistant(random_assistant(target(), centroids=True), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("post_projection.weight"), "lacks tensor post_projection.weight"),
        (lambda tensors: tensors.pop("model.layers.2.layer_scalar"), "lacks tensor model.layers.2.layer_scalar"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(2)}), "unknown tensor"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(23)}), r"model.norm.weight of shape \[23\]"),
        (
            lambda tensors: tensors.update({"model.layers.3.self_attn.q_norm.weight": torch.ones(8)}),
            r"model.layers.3.self_attn.q_norm.weight of shape \[8\]; expected \[16\]",
        ),
        (
            lambda tensors: tensors["masked_embedding.token_ordering"].fill_(1),
            "token_ordering does not hold each token once",
        ),
    ],
)
def test_tensors_are_checked_by_name(stored, change, said):
    tensors = load_file(stored / FILE)
    change(tensors)
    save_file(tensors, stored / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=f"draft: .*{said}"):
        load_assistant(stored, target())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": None}, "has no text_config"),
        ({"backbone_hidden_size": 64}, r"pre_projection.weight of shape \[24, 64\]; expected \[24, 128\]"),
        ({"backbone_hidden_size": "many"}, "'many' is not a size"),
        ({"backbone_hidden_size": None}, "backbone_hidden_size"),
        ({"num_centroids": 7}, "num_centroids: 7"),
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": "muse_glimmer_assistant"}, "block drafter.*'dflash:DIR'"),
        ({"text": {"layer_types": ["full_attention"]}}, "layer_types"),
        ({"text": {"num_attention_heads": 3}}, "3 attention heads cannot share"),
        ({"text": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"text": {"vocab_size": 95}}, "(vocab_size|num_centroids|shape)"),
        ({"text": {"intermediate_size": None}}, "lacks intermediate_size"),
    ],
)
def test_configs_are_checked(stored, change, said):
    fields = json.loads((stored / "config.json").read_text())
    inner = fields["text_config"] | change.get("text", {})
    fields = fields | {"text_config": {name: value for name, value in inner.items() if value is not None}} | change
    (stored / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"draft: .*{said}"):
        load_assistant(stored, target())


def test_a_separate_output_embedding(stored):
    """A tied one may be stored twice; an untied one wins over the input embedding, which the target has."""
    tensors = load_file(stored / FILE)
    own, other = tensors["model.embed_tokens.weight"], torch.randn(96, 24)
    fields = json.loads((stored / "config.json").read_text())
    for names, tied, expected in (
        ({"lm_head.weight": own.clone(), "model.embed_tokens.weight": own}, True, own),
        ({"lm_head.weight": own}, True, own),
        ({"lm_head.weight": other, "model.embed_tokens.weight": own}, False, other),
    ):
        others = {name: t for name, t in tensors.items() if name != "model.embed_tokens.weight"}
        save_file({**others, **names}, stored / FILE, {"format": "pt"})
        (stored / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": tied}))
        assert torch.equal(load_assistant(stored, target()).model.embed_tokens.weight, expected)


def test_another_target_is_refused(stored):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM keeps no keys and values of a layer with sliding"):
        AssistedModelForCausalLM.from_models(build(BY_NAME["llama"]), draft=str(stored))
    head = random_assistant(build(BY_NAME["gemma4"]))  # its heads of full attention have 512 numbers
    with pytest.raises(ValueError, match=r"draft: this assistant reads keys and values of .*load it with this target"):
        AssistedModelForCausalLM.from_models(target(), draft=Assistant(head))
    other = gemma4(vocab_size=80, vocab_size_per_layer_input=80)
    with pytest.raises(ValueError, match=r"draft: .*trained for a vocabulary of 96, but the target's has 80"):
        AssistedModelForCausalLM.from_models(other, draft=Assistant(random_assistant(target())))
    with pytest.raises(ValueError, match="target: Llama4ForCausalLM turns its keys in another way"):
        random_assistant(build(BY_NAME["llama4"]))


def test_strings_and_specs(stored):
    assert parse("assistant:org/name") == Assistant("org/name")
    assert parse(str(stored)) == Assistant(str(stored))
    assert METHODS["assistant"] is Assistant
    head = random_assistant(target())
    assert parse(head).path is head
    assert is_assistant({"model_type": "gemma4_unified_assistant"}) and not is_assistant({"model_type": "gemma4_text"})
    with pytest.raises(ValueError, match="top_k"):
        Assistant("org/name", top_k=0)
    with pytest.raises(ValueError, match="position: 'first' is not known"):
        Assistant("org/name", position="first")
    with pytest.raises(ValueError, match="draft: 'assistant' does not name a checkpoint"):
        parse("assistant:")


def test_what_a_plan_counts(stored):
    """Its weights, and no keys and values."""
    room = Room(target(), torch.float32, 10, (16, 24), lambda model: {}, lambda window: 10)
    numbers = sum(tensor.numel() for tensor in load_file(stored / FILE).values())
    assert Assistant(str(stored)).memory(room) == {"Gemma 4 assistants": 4 * numbers}


def test_half_precision_and_buffers():
    head = random_assistant(target(), centroids=True).bfloat16()
    assert {tensor.dtype for tensor in head.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert all(tensor.dtype == torch.float32 for name, tensor in head.named_buffers() if name.endswith("inv_freq"))
    model = gemma4().bfloat16()
    pair = assisted(model, head)
    with no_fallback():
        pair.generate(**one_and_four(model)[0], **CALL)
    assert pair.report.drafted > 0


def test_nodes_read_the_states_of_their_parents():
    model = target()
    head = random_assistant(model)
    text = random_ids(model, 1, 6)[0].tolist()
    slots = SlotCache(1, 16)
    runner = target_runner(model, slots, Traits.of(model).masks)
    runner.prefill(torch.tensor([text[:-1]]), None)
    states, _ = keys_of(model, head, torch.tensor([text[:-1]]))
    reader = AssistantReader(Step(head, runner, "next"), states[:, -1])
    reference = Reference(model, head)
    first = reader.first(torch.tensor([text[-1:]]))
    assert torch.allclose(first[0, 0], reference.logits(text, []), atol=ROUNDING)
    reader.read([[5, 6]], [[-1, -1]], [[1, 1]])
    found = reader.read([[7, 8, 9]], [[1, 0, -1]], [[2, 2, 1]])
    for column, path in enumerate(([6, 7], [5, 8], [9])):
        assert torch.allclose(found[0, column], reference.logits(text, path), atol=ROUNDING)


def test_fields_for_any_target():
    fields = fields_for(build(BY_NAME["qwen3"]), layers=2, hidden_size=16)
    assert fields["text_config"]["layer_types"] == ["full_attention"] * 2
    assert (fields["backbone_hidden_size"], fields["text_config"]["hidden_size"]) == (32, 16)
    mixed = fields_for(target(2))
    assert mixed["text_config"]["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]


@torch.no_grad()
def test_training_steps_are_the_steps_of_a_draft():
    """Column i of step s is what an assistant says of the text up to token i + 1, and then of s tokens that follow."""
    model = target()
    method = AssistantTraining(model, AssistantSettings(layers=3))
    for parameter in method.student.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    ids = random_ids(model, 2, 20)
    reference, text = Reference(model, method.student), ids[1].tolist()
    found = []
    method.student.logits, logits = (
        lambda states, target=None: found.append(states) or logits(states),
        method.student.logits,
    )
    method.acceptance(ids)
    for step, states in enumerate(found[:3]):
        for column in (0, 3, 11, 14):
            expected = reference.logits(text[: column + 2], text[column + 2 : column + 2 + step])
            assert torch.allclose(logits(states[1, column]), expected, atol=ROUNDING)
