"""The zoo: its names, the rules of its text, its recipes, and a training that can be interrupted."""

import dataclasses
import hashlib
import json
import re
import runpy
import shlex
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.cli.train import options
from assisted.lab.training import trainer
from assisted.methods.early_exit.train import EarlyExitSettings
from assisted.methods.shared.training.data import read_text
from assisted.zoo import corpus
from tools.shipped import shapes as recipe
from tools.shipped import train
from tools.shipped.shapes import RECIPES, Phase, Recipe, Shape

# ---- names


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_name_is_a_folder_of_the_package(name):
    path = Path(zoo.folder(name))
    assert path.name == name
    assert Path(zoo.__file__).parent in path.parents
    assert zoo.resolve(f"zoo:{name}") == str(path)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "/some/folder", "zoo", "zoo/target", "./zoo", "C:/zoo", "target"])
def test_other_paths_stay_as_they_are(path):
    assert zoo.resolve(path) == path


@pytest.mark.parametrize("name", ["", "nothing", "Target", "../target"])
def test_unknown_names_are_refused(name):
    names = "zoo:target, zoo:draft, zoo:draft-other-tokenizer, zoo:hybrid, zoo:eagle3, zoo:medusa, zoo:dflash, "
    names += "zoo:smollm2-eagle3, zoo:smollm2"
    message = f"zoo:{name} is not in the zoo; one of {names}"
    for call in (lambda: zoo.folder(name), lambda: zoo.resolve(f"zoo:{name}")):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == message


# ---- text


def source(seed, length=300):
    """Some lines that look like a program, other ones for another seed."""
    return (f"name_{seed} = value\n" * length)[:length]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An empty standard library; write(name, text) adds a file."""
    monkeypatch.setattr(corpus, "sysconfig", types.SimpleNamespace(get_paths=lambda: {"stdlib": str(tmp_path)}))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def names(root):
    return [path.relative_to(root).as_posix() for path in corpus.training_files()]


def test_order_is_that_of_the_names(library, tmp_path):
    for number, name in enumerate(("b.py", "a/z.py", "a.py", "a/b/c.py", "B.py")):
        library(name, source(number))
    assert names(tmp_path) == ["B.py", "a.py", "a/b/c.py", "a/z.py", "b.py"]
    assert names(tmp_path) == names(tmp_path)


@pytest.mark.parametrize(
    "folder", ["site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "a/site-packages/b"]
)
def test_folders_left_out(library, tmp_path, folder):
    library(f"{folder}/a.py", source(0))
    library("kept.py", source(1))
    assert names(tmp_path) == ["kept.py"]


def test_a_library_that_lies_in_such_a_folder_is_read(tmp_path, monkeypatch):
    root = tmp_path / "site-packages"
    root.mkdir()
    (root / "a.py").write_text(source(0))
    monkeypatch.setattr(corpus, "sysconfig", types.SimpleNamespace(get_paths=lambda: {"stdlib": str(root)}))
    assert names(root) == ["a.py"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (source(0, 200), True),
        (source(0, 199), False),
        (source(0) + "x" * 400, True),
        (source(0) + "x" * 401, False),
        ("a\n" * 65 + "1\n" * 70 + "b\n" * 65, True),  # 70 digits of 400 characters
        ("1" * 35 + "\n" + "a" * 64 + "\n" + "1" * 35 + "\n" + "a" * 63, True),  # 70 of 200: just the share
        ("1" * 35 + "\n" + "a" * 64 + "\n" + "1" * 36 + "\n" + "a" * 62, False),
        ("\\\"'" * 40 + "\n" + "a" * 100, False),
        (source(0).encode() + b"\xff", False),
    ],
)
def test_files_left_out(library, tmp_path, text, kept):
    library("a.py", text)
    library("other.txt", source(1))
    assert names(tmp_path) == ["a.py"] * kept


def test_of_duplicates_the_first_is_kept(library, tmp_path):
    library("b.py", source(0))
    library("a/c.py", source(0))
    library("d.py", source(1))
    assert names(tmp_path) == ["a/c.py", "d.py"]


def test_read(tmp_path):
    for content, text in ((b"na\xc3\xafve\n", "na\u00efve\n"), (b"na\xefve\n", "")):
        (tmp_path / "a.py").write_bytes(content)
        assert corpus.read(tmp_path / "a.py") == text


@pytest.fixture(scope="module")
def training():
    return corpus.training_files()


@pytest.fixture(scope="module")
def held_out():
    return corpus.held_out_files()


def test_training_text_is_the_standard_library(training):
    assert len(training) > 500
    assert Path(dataclasses.__file__) in training
    for path in training:
        assert not {"site-packages", "dist-packages", *corpus.HELD_OUT_PACKAGES} & set(path.parts[:-1])


def test_held_out_text_is_disjoint_and_never_trained_on(training, held_out):
    assert len(held_out) > 500
    assert all(set(corpus.HELD_OUT_PACKAGES) & set(path.parts) for path in held_out)
    assert not set(held_out) & set(training)
    first, second = ({hashlib.sha256(path.read_bytes()).digest() for path in files} for files in (training, held_out))
    assert not first & second


def test_held_out_text_without_its_packages(monkeypatch, held_out):
    monkeypatch.setattr(corpus, "HELD_OUT_PACKAGES", ("no_such_package_here", "networkx"))
    some = corpus.held_out_files()
    assert some == [path for path in held_out if "networkx" in path.parts]
    monkeypatch.setattr(corpus, "HELD_OUT_PACKAGES", ("no_such_package_here",))
    with pytest.raises(ModuleNotFoundError, match="pip install sympy networkx"):
        corpus.held_out_files()


# ---- recipes


def tiny(name="target", **fields):
    shape = Shape(hidden_size=64, intermediate_size=64, layers=2, heads=1, kv_heads=1)
    rates = {"warmup": 0.5, "cooldown": 0.5}
    return Recipe(
        name, **({"vocab_size": 280, "shape": shape, "phases": (Phase(2, 2, 16), Phase(1, 1, 24))} | rates | fields)
    )


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes(name):
    shipped = RECIPES[name]
    assert shipped.name == name
    assert shipped.plan.steps == sum(phase.steps for phase in shipped.phases)
    assert shipped.plan.rate(shipped.plan.steps - 1) < 0.01
    assert max(phase.context for phase in shipped.phases) <= train.CONTEXT
    assert shipped.shape.hidden_size == 64 * shipped.shape.heads
    if shipped.teacher is not None:
        assert RECIPES[shipped.teacher].vocab_size == shipped.vocab_size


def test_every_shipped_model_has_a_recipe():
    assert set(RECIPES) == set(zoo.MODELS)
    assert recipe.OTHER_DRAFT.vocab_size != recipe.TARGET.vocab_size


# ---- batches: functions of the seed and the step


def batches(phases, seed=3):
    stream = np.arange(1000, dtype=np.int32)  # a token is its position in the text
    return train.batches(stream, tiny(phases=phases, seed=seed))


def test_each_phase_has_its_own_windows():
    batch = batches((Phase(4, 3, 16), Phase(2, 5, 40), Phase(1, 1, 8)))
    found = [batch(step) for step in range(7)]
    assert [ids.shape for ids in found] == [(3, 16)] * 4 + [(5, 40)] * 2 + [(1, 8)]
    for ids in found:
        assert ids.dtype == torch.int64
        assert torch.equal(ids, ids[:, :1] + torch.arange(ids.shape[1]))
    assert all(torch.equal(batch(step), found[step]) for step in (5, 2, 6, 0))
    other = batches((Phase(4, 3, 16),), seed=4)
    assert any(not torch.equal(other(step), found[step]) for step in range(4))
    starts = torch.cat([ids[:, 0] for ids in found[:4]])
    assert len(starts.unique()) == len(starts)  # every window once per epoch


# ---- training


class Interrupted(Exception):
    pass


@pytest.fixture
def school(tmp_path, monkeypatch):
    """Three recipes that train in three steps, on a small text."""
    files = []
    for number in range(4):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text("\n".join(f"def f{i}(x_{number}):\n    return x_{number} + {i}" for i in range(20)))
    monkeypatch.setattr(corpus, "training_files", lambda: files)
    monkeypatch.setattr(corpus, "held_out_files", lambda: files[:1])
    recipes = [tiny(exits=EarlyExitSettings()), tiny("draft", teacher="target", seed=5), tiny("other", seed=6)]
    monkeypatch.setattr(train, "RECIPES", {recipe.name: recipe for recipe in recipes})
    plan = Recipe.plan.fget
    quick = property(lambda self: dataclasses.replace(plan(self), checkpoint_every=1, evaluate_rows=2))
    monkeypatch.setattr(Recipe, "plan", quick)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def rows_in(folder):
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def test_a_training_interrupted_is_the_training_uninterrupted(school, tmp_path, monkeypatch):
    """All recipes train through the package's trainer; it resumes them after a stop and after a crash."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    step = trainer._step

    def fails_at_step_2(*args):
        if args[-1] == 2:
            raise Interrupted
        return step(*args)

    for name, method in (("target", "early-exit"), ("draft", "distill")):
        folder = train.train(name, whole, compile_layers=False)
        assert folder == whole / name
        about = json.loads((folder / "training.json").read_text())
        assert (about["method"], about["steps"], about["recipe"]["name"]) == (method, 3, name)

        train.train(name, parts, compile_layers=False, stop_after=1)
        assert (parts / name / "checkpoint.pt").exists()
        assert not (parts / name / "model.safetensors").exists()
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "_step", fails_at_step_2)
            with pytest.raises(Interrupted):
                train.train(name, parts, compile_layers=False)
        train.train(name, parts, compile_layers=False)

        expected, found = weights(folder), weights(parts / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert not (parts / name / "checkpoint.pt").exists()
        assert rows_in(parts / name) == rows_in(folder)
        assert [row["step"] for row in rows_in(folder) if "loss" in row] == [0, 1, 2]
        untrained = train.build_model(train.RECIPES[name]).state_dict()
        assert any(not torch.equal(untrained[key].bfloat16().float(), expected[key]) for key in expected)


def test_a_trained_folder_loads_as_any_other(school, tmp_path):
    folder = train.train("target", tmp_path, compile_layers=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert len(tokenizer) <= model.config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    text = "def caf\u00e9(x):\n    return  'a b'\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": " pass"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "def f(): pass"


def test_files_are_one_stream_with_ends(school, tmp_path):
    tokenizer = train.train_tokenizer(280, tmp_path)
    stream = read_text(tokenizer, ["zoo"]).training
    assert stream[-1] == tokenizer.eos_token_id
    pieces = np.split(stream, np.flatnonzero(stream == tokenizer.eos_token_id) + 1)[:-1]
    texts = [path.read_text() for path in corpus.training_files()]
    assert [tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == texts


def test_the_command(school, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["shipped", "train", "target", "--out", str(tmp_path), "--stop-after", "1", "--no-compile"]
    )
    runpy.run_module("tools.shipped", run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path / 'target'}\n"
    assert (tmp_path / "target" / "checkpoint.pt").exists()


def test_what_cannot_be_trained(school, tmp_path):
    with pytest.raises(ValueError, match="name: 'giant' is not a shipped model; one of target, draft"):
        train.train("giant", tmp_path)
    with pytest.raises(ValueError, match="'draft' is distilled from 'target'; train that one first"):
        train.train("draft", tmp_path)


# ---- heads


@pytest.fixture
def head(name):
    folder = Path(zoo.folder(name))
    if not folder.is_dir():
        pytest.skip(f"zoo:{name} is not shipped")
    return folder


def new_model(draft, **kwargs):
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=draft, **kwargs)
    return model, model.tokenizer("def mean(values):\n    total = 0\n", return_tensors="pt")


@pytest.mark.parametrize("name", zoo.HEADS)
@pytest.mark.parametrize("draft", ["{kind}:zoo:{}", ["suffix", "zoo:{}"]], ids=str)
def test_heads_draft_for_the_shipped_target(head, name, draft):
    kind = {"eagle3": "eagle", "medusa": "medusa", "dflash": "dflash"}[name]
    written = [part.format(name, kind=kind) for part in ([draft] if isinstance(draft, str) else draft)]
    model, inputs = new_model(written if len(written) > 1 else written[0])
    plain = model.target.generate(**inputs, max_new_tokens=32, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate(**inputs, max_new_tokens=32, do_sample=False, draft_length=4).equal(plain)
    assert model.report.accepted > 0
    modules = model.drafter.modules if len(written) == 1 else model.drafter.members[-1].modules
    assert {p.dtype for module in modules for p in module.parameters()} == {torch.float32}  # the target's


@pytest.mark.parametrize("name", zoo.HEADS)
def test_heads_are_stored_in_half_precision_and_say_where_they_come_from(head, name):
    assert {path.suffix for path in head.iterdir()} == {".json", ".safetensors"}
    (file,) = head.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        stored = {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118, it has no iterator
    assert stored <= {torch.bfloat16, torch.float16}
    about = json.loads((head / "training.json").read_text())
    assert about["target"] == "zoo:target"
    assert about["command"].startswith(f"assisted train {about['method']} --target zoo:target --text zoo ")
    for path in head.glob("*.json"):  # nothing of the machine it was made on
        assert not re.search(r"(^|[\s\"'=])(/|~|[A-Za-z]:\\)\w", path.read_text()), path


@pytest.mark.parametrize("name", zoo.HEADS)
def test_the_command_that_trained_a_head_is_one_that_can_be_given(head, name):
    about = json.loads((head / "training.json").read_text())
    parser, words = options(about["method"]), shlex.split(about["command"])[3:]
    _, plan, args = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    assert (plan.steps, plan.batch, plan.context) == (about["steps"], about["batch"], about["context"])
    assert args.store in ("bfloat16", "float16")


def test_all_that_is_shipped_is_small():
    models = Path(zoo.folder("target")).parent
    assert sum(path.stat().st_size for path in models.rglob("*") if path.is_file()) < 64 * 2**20


def test_the_shipped_files_are_package_data():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    found = tomllib.loads((Path(zoo.__file__).parents[2] / "pyproject.toml").read_text())
    patterns = found["tool"]["setuptools"]["package-data"]["assisted.zoo"]
    here = Path(zoo.__file__).parent
    packaged = {path for pattern in patterns for path in here.glob(pattern)}
    shipped = {path for name in zoo.NAMES for path in Path(zoo.folder(name)).glob("*")}
    assert shipped - packaged == set()


@pytest.mark.parametrize("name", [name for names in zoo.HEADS_OF_PACKAGED.values() for name in names])
def test_heads_of_other_packages_models_say_how_they_were_made(name):
    about = json.loads((Path(zoo.folder(name)) / "training.json").read_text())
    (target,) = [target for target, names in zoo.HEADS_OF_PACKAGED.items() if name in names]
    assert about["target"] == f"zoo:{target}"
    assert f"--target zoo:{target} " in about["command"]
    with pytest.raises(ValueError, match=name):
        AssistedModelForCausalLM.from_pretrained("zoo:target", draft=f"zoo:{name}")


def test_the_card_states_what_the_heads_do():
    models = Path(zoo.folder("target")).parent
    figures = json.loads((models / "card.json").read_text())
    card = (models / "README.md").read_text()
    for row in figures.get("heads", []):
        assert f"`zoo:{row['name']}`" in card
        assert row["command"] in card
    there = {name for name in zoo.HEADS if Path(zoo.folder(name)).is_dir()}
    assert {row["name"] for row in figures.get("heads", [])} == there
