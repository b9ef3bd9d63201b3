"""docs/migrating.md: both columns are run, and what it says of transformers' own drafting is shown.

The claims hold for one version of transformers. Where a later one does better, the test of the claim fails, and the page
is to be changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_docs import blocks
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria

from assisted import AssistedModelForCausalLM, zoo

pytestmark = pytest.mark.documents

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
PINNED = "5.23"
CALL = {"max_new_tokens": 32, "do_sample": False}
MODES = ["draft model", "prompt lookup", "early exit"]


def changed(claim: str) -> str:
    """What an assertion says when transformers no longer does what the page says of it."""
    return (
        f"{PAGE.name} says of transformers {PINNED}: {claim}. transformers {transformers.__version__} does not do that."
    )


def test_the_page_is_about_the_installed_version() -> None:
    assert transformers.__version__.startswith(f"{PINNED}."), changed("everything on the page")
    assert f"transformers {PINNED}" in PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(zoo.folder("target"))


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> dict[str, torch.Tensor]:
    return dict(tokenizer("def mean(values):\n", return_tensors="pt"))


@pytest.fixture
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.float32)


@pytest.fixture
def draft() -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=torch.float32)


@pytest.fixture
def pair(target: Any, draft: Any, tokenizer: Any) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer, draft_length=4)


def theirs(mode: str, draft: Any) -> dict[str, Any]:
    """The arguments of `generate` that choose a way to draft in transformers."""
    return {
        "draft model": {"assistant_model": draft},
        "prompt lookup": {"prompt_lookup_num_tokens": 5},
        "early exit": {"assistant_early_exit": 3},
    }[mode]


def ours(mode: str, target: Any, draft: Any) -> AssistedModelForCausalLM:
    spec = {"draft model": draft, "prompt lookup": "ngram", "early exit": "early-exit:3"}[mode]
    return AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=4)


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """The tokens of each pass of a module that is called with ids or hidden states."""
    seen: list[int] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs.get("input_ids", kwargs.get("hidden_states"))
        seen.append(given.shape[1])

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


# --- the two columns


def test_both_columns_say_what_plain_decoding_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    lines = text.splitlines()
    plain: list[list[int]] = []
    columns = []
    for block in blocks(text):
        if block.language != "python":
            continue
        title = re.search(r'title="(\w+)"', lines[block.line - 2])
        namespace.pop("output", None)
        exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec", dont_inherit=True), namespace)
        if title is None:
            plain = namespace["target"].generate(**namespace["inputs"], **namespace["settings"]).tolist()
            continue
        columns.append(title[1])
        assert namespace["output"].tolist() == plain, f"line {block.line}, {title[1]}"
    assert set(columns) == {"transformers", "assisted"}
    following = dict(enumerate(columns[1:]))
    assert all(following[place] == "assisted" for place, name in enumerate(columns) if name == "transformers")


# --- what else is different


def test_batches(target: Any, draft: Any, pair: AssistedModelForCausalLM, tokenizer: Any) -> None:
    batch = tokenizer(["def area(radius):\n", "class Stack:\n    def push"], return_tensors="pt", padding=True)
    for mode in MODES:
        with pytest.raises(ValueError, match="batch_size = 1"):
            target.generate(**batch, **CALL, **theirs(mode, draft))
            pytest.fail(changed("batches are refused"))
    assert pair.generate(**batch, **CALL).tolist() == target.generate(**batch, **CALL).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn(target: Any, draft: Any, tokenizer: Any, inputs: dict[str, torch.Tensor], mode: str) -> None:
    more = tokenizer("\ndef median(values):\n", return_tensors="pt").input_ids

    def two_turns(model: Any, **how: Any) -> tuple[list[Any], list[Any]]:
        """What the second turn says over the first one's cache, and what plain decoding says without one."""
        first = model.generate(**inputs, **CALL, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more], 1)
        call = {"attention_mask": torch.ones_like(ids), **CALL}
        found = model.generate(ids, **call, past_key_values=first.past_key_values, **how)
        return found.tolist(), target.generate(ids, **call).tolist()

    found, plain = two_turns(target)
    assert found == plain
    found, plain = two_turns(target, **theirs(mode, draft))
    assert found != plain, changed(f"a second turn over a filled cache comes out wrong ({mode})")
    found, plain = two_turns(ours(mode, target, draft))
    assert found == plain


class Behind(StoppingCriteria):
    """Stops behind a token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stopping_criteria(target: Any, draft: Any, pair: Any, inputs: dict[str, torch.Tensor]) -> None:
    text = target.generate(**inputs, **CALL)[0, inputs["input_ids"].shape[1] :].tolist()
    missed = 0
    for token in dict.fromkeys(text):
        plain = target.generate(**inputs, **CALL, stopping_criteria=[Behind(token)])
        found = target.generate(**inputs, **CALL, stopping_criteria=[Behind(token)], assistant_model=draft)
        missed += found.tolist() != plain.tolist()
        assert pair.generate(**inputs, **CALL, stopping_criteria=[Behind(token)]).tolist() == plain.tolist()
    assert missed, changed("a criterion that holds inside an accepted draft is missed")


def test_stop_strings(target: Any, draft: Any, pair: Any, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> None:
    stop = {"stop_strings": ["return"], "tokenizer": tokenizer}
    plain = target.generate(**inputs, **CALL, **stop)
    assert plain.shape[1] < target.generate(**inputs, **CALL).shape[1]
    with pytest.raises(ValueError, match="tokenizer"):
        target.generate(**inputs, **CALL, **stop, assistant_model=draft)
        pytest.fail(changed("stop_strings with a draft model raise"))
    assert pair.generate(**inputs, **CALL, **stop).tolist() == plain.tolist()


class Remembers:
    """A logits processor that changes nothing and keeps the lengths it was shown."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


@pytest.mark.parametrize("mode", MODES)
def test_processors(target: Any, draft: Any, inputs: dict[str, torch.Tensor], mode: str) -> None:
    def shown(generate: Callable[..., Any], **how: Any) -> list[int]:
        processor = Remembers()
        generate(**inputs, **CALL, logits_processor=[processor], **how)
        return processor.lengths

    once = shown(target.generate)
    found = shown(target.generate, **theirs(mode, draft))
    assert len(found) > len(once), changed("processors see prefixes more than once")
    assert found != sorted(found), changed("processors see lengths that go backwards")
    assert shown(ours(mode, target, draft).generate) == once


def test_a_padded_vocabulary(target: Any, draft: Any, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> None:
    draft.resize_token_embeddings(draft.config.vocab_size + 64, mean_resizing=False)
    with pytest.raises(ValueError, match="different tokenizers"):
        target.generate(**inputs, **CALL, assistant_model=draft)
        pytest.fail(changed("a padded vocabulary is taken for another tokenizer"))
    both = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    with pytest.raises(AttributeError):
        target.generate(**inputs, max_new_tokens=8, do_sample=True, assistant_model=copy.deepcopy(draft), **both)
        pytest.fail(changed("sampling with a padded vocabulary fails"))
    pair = AssistedModelForCausalLM.from_models(
        target, draft=draft, tokenizer=tokenizer, draft_tokenizer=tokenizer, draft_length=4
    )
    assert pair.generate(**inputs, **CALL).tolist() == target.generate(**inputs, **CALL).tolist()
    pair.generate(**inputs, max_new_tokens=8, do_sample=True)
    assert pair.report.drafted > 0


def test_a_translated_draft_when_sampling(target: Any, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> None:
    folder = zoo.folder("draft-other-tokenizer")
    draft, its = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    draft.generation_config.repetition_penalty = 1.3
    head = draft.lm_head
    pair = AssistedModelForCausalLM.from_models(
        target, draft=draft, tokenizer=tokenizer, draft_tokenizer=its, draft_length=4
    )
    pair.generate(**inputs, max_new_tokens=8, do_sample=True)
    assert draft.lm_head is head
    assert draft.generation_config.repetition_penalty == 1.3

    call = {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": its}
    target.generate(**inputs, max_new_tokens=8, do_sample=True, **call)
    assert draft.lm_head is not head, changed("the draft's output layer is exchanged")
    assert draft.generation_config.repetition_penalty is None, changed("the draft's repetition penalty is unset")


def test_an_interrupt_in_an_early_exit(target: Any, draft: Any, inputs: dict[str, torch.Tensor]) -> None:
    plain = target.generate(**inputs, **CALL)
    layers = target.config.num_hidden_layers
    passes = 0

    def interrupt(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:  # the prompt, then a draft
            raise KeyboardInterrupt

    pair = ours("early exit", target, draft)
    handle = target.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.generate(**inputs, **CALL)
    assert target.config.num_hidden_layers == layers
    passes = 2  # transformers drafts first
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **CALL, assistant_early_exit=3)
    handle.remove()
    assert target.config.num_hidden_layers == 3, changed("the model's config keeps the smaller number of layers")
    target.config.num_hidden_layers = layers
    assert pair.generate(**inputs, **CALL).tolist() == plain.tolist()


def test_the_heuristic(target: Any, draft: Any, pair: Any, inputs: dict[str, torch.Tensor]) -> None:
    before = draft.generation_config.to_dict()
    pair.generate(**inputs, **CALL)
    assert draft.generation_config.to_dict() == before
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 3, "heuristic"
    config.assistant_confidence_threshold = 0.0
    target.generate(**inputs, **CALL, assistant_model=draft)
    assert draft.generation_config.num_assistant_tokens != 3, changed("the draft's config holds the last length")


def test_two_ways_at_once(target: Any, draft: Any, pair: Any, inputs: dict[str, torch.Tensor]) -> None:
    with counted(draft) as passes:
        target.generate(**inputs, **CALL, assistant_model=draft, prompt_lookup_num_tokens=5)
    assert not passes, changed("with prompt_lookup_num_tokens the draft model is never run")
    both = {"assistant_model": draft, "prompt_lookup_num_tokens": 5}
    for argument, name in (
        (both, "prompt_lookup_num_tokens: .*assistant_model"),
        (theirs("early exit", draft), "assistant"),
    ):
        with pytest.raises(ValueError, match=name):
            pair.generate(**inputs, **CALL, **argument)


@pytest.mark.parametrize("folder", ["draft", "draft-other-tokenizer"])
def test_the_pipelines_own_assistant(target: Any, tokenizer: Any, folder: str) -> None:
    model = AssistedModelForCausalLM.from_models(target, tokenizer=tokenizer)
    text, path = "def mean(values):\n", zoo.folder(folder)
    ours, plain = (
        transformers.pipeline("text-generation", model=one, tokenizer=tokenizer, **more)(text, **CALL)
        for one, more in ((model, {"assistant_model": path}), (target, {}))
    )
    assert ours == plain
    assert model.report.draft == path and model.report.drafted > 0


def test_lengths_given_to_generate(target: Any, draft: Any, pair: Any, inputs: dict[str, torch.Tensor]) -> None:
    def draft_passes(**how: Any) -> int:
        with counted(draft) as passes:
            target.generate(**inputs, **CALL, assistant_model=draft, **how)
        return len(passes)

    usual = draft_passes()
    for name, value in {"num_assistant_tokens": 1, "assistant_confidence_threshold": 0.99}.items():
        assert draft_passes(**{name: value}) == usual, changed(f"{name} given to generate changes nothing")
    draft.generation_config.num_assistant_tokens = 1
    assert draft_passes() != usual
    pair.generate(**inputs, **CALL, draft_length=1)
    assert len(pair.report.acceptance_by_position) == 1


def test_a_way_to_draft_in_the_models_config(
    target: Any, draft: Any, pair: Any, inputs: dict[str, torch.Tensor]
) -> None:
    plain = target.generate(**inputs, **CALL).tolist()
    target.generation_config.prompt_lookup_num_tokens = 5
    with counted(target) as passes:
        target.generate(**inputs, **CALL)
    assert max(passes[1:]) > 1, changed("prompt lookup in the model's config copies from the text in every call")
    with pytest.warns(UserWarning, match="prompt_lookup_num_tokens = 5 is not used"), counted(draft) as passes:
        assert pair.generate(**inputs, **CALL).tolist() == plain
    assert passes
    for given in ({"prompt_lookup_num_tokens": 4}, {"generation_config": GenerationConfig(num_assistant_tokens=3)}):
        with pytest.warns(
            UserWarning, match=r"(prompt_lookup_num_tokens|num_assistant_tokens) = \d: this call drafts with"
        ):
            assert pair.generate(**inputs, **{**CALL, **given}).tolist() == plain
