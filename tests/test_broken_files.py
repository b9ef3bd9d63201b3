"""Every file of a model, a draft, heads and a saved pair, broken in every way: it loads and says what plain `generate` says, or
ends in ValueError or OSError that names where. Nothing else, and soon."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, build, half_right, random_ids
from eagle_heads import random_head
from pairs import CALL, tokenizer
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM
from assisted.methods.eagle.formats import save_eagle
from assisted.methods.medusa.head import MedusaHeads

BREAK = {
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)) * 4,
    "halved": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[1, 2]",
    "an object": lambda data: b'{"a": {"b": []}}',
    "deep": lambda data: b"[" * 100_000,
    "header of 2**60 bytes": lambda data: (2**60).to_bytes(8, "little") + data[8:],
}
WRONG = ["wrong", -1, 10**18, 1.5, [], {}]
FILES = {
    "target": ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"],
    "draft": ["config.json", "model.safetensors", "tokenizer.json"],
    "eagle": ["config.json", "model.safetensors"],
    "medusa": ["config.json", "medusa_lm_head.safetensors"],
    "pair": ["config.json", "target/config.json", "target/model.safetensors", "draft/config.json"],
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A target, a draft, heads and a saved pair, all whole."""
    root = tmp_path_factory.mktemp("sound")
    target = build(ARCHITECTURES[0])
    for name, model in (("target", target), ("draft", half_right(target, noise=0.1))):
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    save_eagle(random_head(target), root / "eagle")
    MedusaHeads.for_target(target, heads=2).save(root / "medusa")
    load(root, "draft").save_pretrained(root / "pair")
    return root


@pytest.fixture
def root(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def load(root, what):
    if what == "pair":
        return AssistedModelForCausalLM.from_pretrained(root / "pair")
    draft = {"target": "ngram", "draft": str(root / "draft"), "eagle": f"eagle:{root / 'eagle'}"}
    draft |= {"medusa": f"medusa:{root / 'medusa'}"}
    return AssistedModelForCausalLM.from_pretrained(root / "target", draft=draft[what], draft_length=4)


def check(root, what):
    """Of what loads, the text of the target alone; of the rest, an error that says where. Returns whether it loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = load(root, what)
        except (ValueError, OSError) as error:
            assert type(error) in (ValueError, OSError, FileNotFoundError), repr(error)
            assert str(root) in str(error), error
            return False
        ids = random_ids(model.target, 1, 8, seed=3)
        plain = AutoModelForCausalLM.from_pretrained(root / ("pair/target" if what == "pair" else "target"))
        try:
            expected = plain.generate(ids, **CALL)
        except Exception:
            return True  # transformers' own, which loads it too
        try:
            ours = model.generate(ids, **CALL)
        except ValueError as error:
            assert str(error).split(":")[0].isidentifier(), error  # it names the argument that cannot be honoured
            return True
        assert ours.tolist() == expected.tolist()
    return True


@pytest.mark.parametrize(("what", "file"), [(what, file) for what, files in FILES.items() for file in files])
def test_files_broken_in_every_way(what, file, root):
    path = root / what / file
    data = path.read_bytes()
    for kind, change in BREAK.items():
        path.write_bytes(change(data))
        try:
            loaded = check(root, what)
        except Exception as error:
            raise AssertionError(f"{kind}: {error!r}") from error
        assert not (loaded and file.endswith("safetensors")), kind
    path.unlink()
    check(root, what)


@pytest.mark.parametrize("file", ["target/config.json", "target/generation_config.json", "draft/config.json"])
def test_fields_of_the_wrong_type(file, root):
    fields = json.loads((root / file).read_text())
    for place, name in enumerate([*fields, "temperature", "eos_token_id", "rope_parameters"]):
        for value in (WRONG[place % 6], WRONG[(place + 2) % 6]):
            (root / file).write_text(json.dumps(fields | {name: value}))
            try:
                check(root, file.split("/")[0])
            except Exception as error:
                raise AssertionError(f"{name} = {value!r}: {error!r}") from error


def test_a_tokenizer_that_cannot_be_read_is_warned_of_or_named(root):
    (root / "draft" / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match=r"tokenizer.*draft/tokenizer\.json"):
        load(root, "draft")
    build(ARCHITECTURES[0], vocab_size=120).save_pretrained(root / "draft")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"draft/tokenizer\.json"):
        load(root, "draft")
