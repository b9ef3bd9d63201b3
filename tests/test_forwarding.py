"""A pair is a PreTrainedModel in full: its target, for every name that transformers gives a model, in every change of it."""

from __future__ import annotations

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from covering import one_in
from pairs import BY_NAME, CALL, prompt, tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from assisted import AssistedModelForCausalLM
from assisted.forwarding import OWN, surface

DRAFTS = ["suffix", "ngram", "recycle", "early-exit:1", "layer-skip", "MODEL"]


def pair_of(draft: str = "ngram", **kwargs: Any) -> AssistedModelForCausalLM:
    model = build(BY_NAME["llama"])
    given = build(BY_NAME["llama"]) if draft == "MODEL" else draft
    return AssistedModelForCausalLM.from_models(model, draft=given, draft_length=4, tokenizer=tokenizer(), **kwargs)


def check(pair: AssistedModelForCausalLM) -> None:
    """The pair writes what its target writes alone."""
    ids = prompt()["ids"]
    plain = pair.target.generate(input_ids=ids, **CALL)
    assert pair.generate(input_ids=ids, **CALL).tolist() == plain.tolist()


# --- every name


def test_every_name_is_the_targets() -> None:
    """What this release of transformers gives a model, and what a later one adds: read from the target, written to it."""
    pair = pair_of()
    for name in sorted(surface() - OWN):
        expected, found = getattr(pair.target, name), getattr(pair, name)
        if inspect.ismethod(expected):
            assert getattr(found, "__wrapped__", found) == expected, name
        elif name == "dummy_inputs":
            assert found.keys() == expected.keys()
        else:
            assert found is pair if expected is pair.target else found == expected, name
        if not isinstance(inspect.getattr_static(pair.target, name), property) and not callable(expected):
            setattr(pair, name, expected)
            assert name not in vars(pair)
            assert getattr(pair.target, name) == expected, name


def test_what_is_its_own_exists() -> None:
    """A name that transformers no longer has is taken out of the list."""
    assert surface() >= OWN


def test_the_class_has_what_transformers_gives_it() -> None:
    assert AssistedModelForCausalLM.can_generate()
    assert AssistedModelForCausalLM.base_model_prefix == PreTrainedModel.base_model_prefix
    assert isinstance(pair_of(), (PreTrainedModel, GenerationMixin))
    assert "labels" in inspect.signature(AssistedModelForCausalLM.forward).parameters


def test_modules_weights_and_hooks_are_the_targets() -> None:
    pair = pair_of("MODEL")
    target = pair.target
    assert [name for name, _ in pair.named_parameters()] == [name for name, _ in target.named_parameters()]
    assert list(pair.state_dict()) == list(target.state_dict())
    assert pair.base_model is target.model is pair.get_decoder()
    assert pair.get_input_embeddings() is target.get_input_embeddings()
    assert pair.config._name_or_path == target.config._name_or_path
    assert inspect.signature(pair.forward) == inspect.signature(target.forward)
    assert "LlamaModel" in repr(pair) and repr(pair).startswith("AssistedModelForCausalLM(")
    calls: list[int] = []
    handle = pair.register_forward_hook(lambda *args: calls.append(1))
    pair(input_ids=prompt()["ids"])
    target(input_ids=prompt()["ids"])
    assert len(calls) == 2
    handle.remove()
    pair.lm_head = nn.Linear(target.config.hidden_size, target.config.vocab_size, bias=False)
    assert target.lm_head is pair.lm_head and pair.get_output_embeddings() is target.lm_head
    check(pair)


def test_methods_that_return_the_model_return_the_pair() -> None:
    pair = pair_of("MODEL")
    assert pair.train() is pair and pair.target.training and pair.model.training
    assert pair.eval() is pair and not pair.target.training
    assert pair.requires_grad_(False) is pair and not pair.lm_head.weight.requires_grad
    assert pair.to(torch.bfloat16) is pair
    assert pair.dtype == pair.target.dtype == pair.drafter.model.dtype == torch.bfloat16


def test_what_is_set_on_the_configuration_is_set_on_the_targets() -> None:
    pair = pair_of()
    pair.config.use_cache = False
    pair.config._attn_implementation = "eager"
    pair.config.initializer_range = 0.5
    target = pair.target.config
    assert (target.use_cache, target._attn_implementation, target.initializer_range) == (False, "eager", 0.5)
    pair.config.use_cache = True
    check(pair)


def test_own_attributes_stay_with_the_pair() -> None:
    pair = pair_of()
    before = set(vars(pair.target))
    pair.fast = "eager"
    check(pair)
    assert set(vars(pair.target)) == before
    pair.somebodys = 1
    assert pair.target.somebodys == pair.somebodys == 1
    del pair.somebodys
    assert not hasattr(pair, "somebodys") and not hasattr(pair.target, "somebodys")


def test_copies_share_with_their_own_target() -> None:
    pair = pair_of()
    other = copy.deepcopy(pair)
    assert other.lm_head is other.target.lm_head is not pair.lm_head
    with torch.no_grad():
        other.lm_head.weight.neg_()
    check(other)
    check(pair)


# --- changes


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grown_vocabulary(draft: str) -> None:
    pair = pair_of(draft)
    check(pair)
    size = pair.config.vocab_size
    torch.manual_seed(0)
    pair.resize_token_embeddings(size + 64, mean_resizing=False)
    assert pair.config.vocab_size == pair.target.config.vocab_size == pair.lm_head.out_features == size + 64
    check(pair)


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_follow_the_weights(draft: str) -> None:
    """A step of an optimizer between two calls: the text is that of the weights as they are."""
    pair = pair_of(draft)
    check(pair)
    first = pair.generate(input_ids=prompt()["ids"], **CALL).tolist()
    optimizer = torch.optim.AdamW(pair.parameters(), lr=0.3)
    for _ in range(2):
        pair.train()
        pair(input_ids=prompt()["ids"], labels=prompt()["ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check(pair)  # as a trainer rolls out: still in training mode
        pair.eval()
        check(pair)
        assert pair.report.drafted > 0
    assert pair.generate(input_ids=prompt()["ids"], **CALL).tolist() != first


def test_gradient_checkpointing() -> None:
    pair = pair_of("early-exit:1").train()
    pair.gradient_checkpointing_enable()
    pair.enable_input_require_grads()
    assert pair.is_gradient_checkpointing and pair.model.layers[0].gradient_checkpointing
    pair(input_ids=prompt()["ids"], labels=prompt()["ids"]).loss.backward()
    assert pair.lm_head.weight.grad is not None
    with pytest.warns(UserWarning, match="activation checkpointing"):
        check(pair)
    check(pair.eval())
    pair.disable_input_require_grads()
    pair.gradient_checkpointing_disable()
    assert not pair.target.is_gradient_checkpointing


def test_inputs_prepared_by_somebody_else() -> None:
    """PEFT's prompt tuning replaces the method that prepares what every pass is given."""
    pair = pair_of()
    prepare = pair.target.prepare_inputs_for_generation
    seen: list[int] = []

    def prepared(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return prepare(*args, **kwargs)

    pair.prepare_inputs_for_generation = prepared
    with pytest.warns(UserWarning, match="prepare_inputs_for_generation"):
        check(pair)
    assert len(seen) >= CALL["max_new_tokens"]


# --- Trainer


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = (torch.arange(12) * (number + 1)) % 30
        return {"input_ids": ids, "labels": ids, "unused": number}


def trainer(model: Any, folder: Path, steps: int = 4, **kwargs: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **kwargs,
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())


@pytest.mark.parametrize("smoothing", one_in(2, [0.1, 0.0]))
def test_a_trainer_trains_resumes_and_picks_the_best(tmp_path: Path, smoothing: float) -> None:
    options = {"label_smoothing_factor": smoothing}
    plain, pair = build(BY_NAME["llama"]), pair_of("MODEL")
    expected, ours = trainer(plain, tmp_path / "plain", **options), trainer(pair, tmp_path / "pair", **options)
    assert ours.label_names == expected.label_names == ["labels"]
    expected.train()
    ours.train()
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-6)
    check(pair.eval())
    first = tmp_path / "pair" / "checkpoint-2"
    resumed = pair_of("MODEL")
    trainer(resumed, tmp_path / "again", **options).train(resume_from_checkpoint=str(first))
    for (name, weight), other in zip(pair.named_parameters(), resumed.parameters(), strict=True):
        assert torch.allclose(weight, other, atol=1e-6), name
    last = get_last_checkpoint(str(tmp_path / "pair"))
    read = AssistedModelForCausalLM.from_pretrained(last)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), pair.parameters(), strict=True))
    check(read)


def test_the_index_names_every_weight(tmp_path: Path) -> None:
    pair = pair_of()
    pair.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert all((tmp_path / file).is_file() for file in index.values())
    assert set(index) >= {name for name in pair.state_dict() if name != "lm_head.weight"}


# --- a process that never imported assisted

READ = """
import sys, torch
from transformers import AutoModelForCausalLM
assert "assisted" not in sys.modules
sys.modules["assisted"] = None
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.modules["assisted"]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
plain = model.target.generate(ids, max_new_tokens=8, do_sample=False)
print(type(model).__name__, bool((model.generate(ids, max_new_tokens=8, do_sample=False) == plain).all()))
model.save_pretrained(sys.argv[2])
"""


def run(code: str, *args: Any, hub: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_folder_is_read_where_nobody_imported_assisted(tmp_path: Path) -> None:
    """And says what is missing where it is not installed."""
    pair_of("MODEL").save_pretrained(tmp_path / "pair")
    done = run(READ, tmp_path / "pair", tmp_path / "copy", hub=tmp_path / "hub")
    assert "This folder is an assisted model" in done.stdout, done.stderr
    assert "AssistedModelForCausalLM True" in done.stdout, done.stderr
    files = [
        {file.relative_to(folder) for file in folder.rglob("*")} for folder in (tmp_path / "pair", tmp_path / "copy")
    ]
    assert files[0] == files[1], "no copies of the package's own code"


def test_remote_code_is_not_run_where_assisted_is_imported(tmp_path: Path) -> None:
    pair_of().save_pretrained(tmp_path)
    (tmp_path / "modeling_assisted.py").write_text("raise AssertionError")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert isinstance(model, AssistedModelForCausalLM)


NAMED = """
import pickle, sys
from transformers import AutoConfig
assert type(AutoConfig.from_pretrained(sys.argv[1])) is type(AutoConfig.for_model("assisted")) is assisted.AssistedConfig
pair = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(pair) is type(pickle.loads(pickle.dumps(pair))) is assisted.AssistedModelForCausalLM
from assisted import *
assert {*assisted.__all__} <= {*globals()}
print("read")
"""


@pytest.mark.parametrize(
    "order",
    one_in(
        2,
        [
            "import assisted; from transformers import GenerationMixin, AutoModelForCausalLM",  # its file imports Auto classes
            "from transformers import AutoModelForCausalLM; import assisted",
        ],
    ),
)
def test_transformers_knows_pairs_whichever_was_imported_first(tmp_path: Path, order: str) -> None:
    pair_of("MODEL").save_pretrained(tmp_path / "pair")
    done = run(order + NAMED, tmp_path / "pair", hub=tmp_path / "hub")
    assert done.stdout == "read\n", done.stderr
