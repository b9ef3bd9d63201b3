"""A trained head, a quantization and a draft length policy, each one file of another installed package (tests/outside/).

Their entry points are all that this package knows of them. It plans with them, measures, saves, reads and refuses them.
"""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
from architectures import half_right
from pairs import CALL, prompt
from pairs import pair as built
from pairs import tokenizer as letters
from transformers import AutoModelForCausalLM

import assisted
from assisted import AssistedModelForCausalLM, Suffix, lengths
from assisted.cli.main import main
from assisted.lab import bench
from assisted.lab.bench.measure import default_drafts
from assisted.lab.bench.table import table
from assisted.lab.doctor.diagnosis import Settings
from assisted.lab.doctor.examine import examine
from assisted.lab.doctor.findings import told
from assisted.lab.handover import hand_over
from assisted.lab.plan import plan
from assisted.lengths.policies import POLICIES
from assisted.loading.backends import BACKENDS, find
from assisted.loading.quantization import memory_bytes
from assisted.methods import METHODS, parse

OUTSIDE = Path(__file__).parent / "outside"
ENTRY_POINTS = """
[assisted.methods]
small = small_head:Small
[assisted.backends]
plain_int8 = plain_int8:BACKEND
[assisted.lengths]
alternating = alternating:Alternating
"""


def install(site: Path, name: str, entry_points: str) -> Path:
    """What pip leaves in a folder of packages. Returns the folder."""
    record = site / f"{name}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(entry_points)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The packages are installed while this module's tests run."""
    folder = install(tmp_path_factory.mktemp("site"), "outside", ENTRY_POINTS)
    for file in OUTSIDE.glob("*.py"):
        shutil.copy(file, folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for registry, name in ((METHODS, "small"), (BACKENDS, "plain_int8"), (POLICIES, "alternating")):
        registry.pop(name, None)


@pytest.fixture(scope="module")
def folders(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, and a head that `assisted train` made."""
    root = tmp_path_factory.mktemp("models")
    target = built("llama")[0]
    for name, model in (("target", target), ("draft", half_right(target))):
        model.save_pretrained(root / name)
        letters().save_pretrained(root / name)
    (root / "text.txt").write_text("abcdefgh" * 200)
    options = ["--text", str(root / "text.txt"), "--steps", "40", "--batch", "4", "--context", "16", "--width", "16"]
    assert main(["train", "small", "--target", str(root / "target"), "--out", str(root / "head"), *options]) == 0
    return root


DRAFTS: dict[str, dict[str, Any]] = {
    "head": {"draft": "head"},
    "head by name": {"draft": "small:head"},
    "quantized draft": {"draft": "draft", "draft_quantization": "int8-plain"},
    "quantized copy": {"draft": "self:int8-plain"},
    "length": {"draft": "draft", "draft_length": "alternating"},
}


ALIKE = ("head by name", "quantized copy")  # differ from others in how they are read, which other tests look at
unlike = pytest.mark.parametrize(
    "given", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in DRAFTS], indirect=True
)


@pytest.fixture(params=DRAFTS)
def given(request: pytest.FixtureRequest, folders: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folders)
    return {"draft_length": 3, **DRAFTS[request.param]}


def test_generates_saves_and_is_read_back(given: dict[str, Any], tmp_path: Path) -> None:
    model = AssistedModelForCausalLM.from_pretrained("target", **given)
    ids = prompt(3)
    plain = model.target.generate(ids["ids"], attention_mask=ids["attention_mask"], **CALL)
    model.save_pretrained(tmp_path)
    for one in (
        model,
        AssistedModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert type(one.spec) is type(model.spec)
        assert one.draft_length == model.draft_length
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = one.generate(ids["ids"], attention_mask=ids["attention_mask"], **CALL)
            one.generate(ids["ids"], attention_mask=ids["attention_mask"], **CALL | {"do_sample": True})
        assert found.tolist() == plain.tolist()
        assert one.report.accepted > 0


def test_a_fresh_process_reads_it_back(site: Path, folders: Path, tmp_path: Path) -> None:
    """Entry points are loaded when they are needed, and not when the package is imported."""
    AssistedModelForCausalLM.from_pretrained(
        folders / "target", draft=f"small:{folders / 'head'}", draft_length="alternating"
    ).save_pretrained(tmp_path)
    code = f"""
import sys
sys.path[:0] = [{str(site)!r}, {str(Path(assisted.__file__).parent.parent)!r}]
import assisted.modeling
assisted.methods.parse("suffix"), assisted.lengths.resolve("adaptive")
assert not {{"small_head", "alternating", "plain_int8"}} & sys.modules.keys()
pair = assisted.AssistedModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(type(pair.spec).__name__, pair.draft_length, "plain_int8" in sys.modules)
"""
    ran = fresh.run(code)
    assert ran.stdout == "Small Alternating(short=1, long=5) False\n", ran.stderr


def test_plan(given: dict[str, Any]) -> None:
    found = plan(
        "target", given["draft"], draft_quantization=given.get("draft_quantization"), memory="1GB", device="cpu"
    )
    drafter = AssistedModelForCausalLM.from_pretrained("target", **given).drafter
    parts = {part.name: part.bytes for part in found.candidates[0].parts}
    if given["draft"] in ("head", "small:head"):
        assert parts["draft: Small head"] == sum(weight.nbytes for weight in drafter.modules[0].parameters())
    elif given["draft"] == "draft":
        assert parts["draft: weights"] == memory_bytes(*drafter.modules, buffers=False) + packed_bytes(
            drafter.modules[0]
        )
    else:
        assert parts["draft: quantized copy"] == packed_bytes(drafter.modules[0])


def packed_bytes(model: Any) -> int:
    """Bytes of the numbers that the quantization stores in buffers."""
    return sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(("packed", "scales")))


def test_plan_of_a_quantized_target(folders: Path) -> None:
    found = plan(str(folders / "target"), quantization="int8-plain", memory="1GB", device="cpu")
    names: dict[str, Any] = {}
    exec("\n".join([*found.imports, f"pair = {found.line}"]), names)
    target = names["pair"].target
    weights = next(part.bytes for part in found.best.parts if part.name == "target: weights")
    assert weights == memory_bytes(target, buffers=False) + packed_bytes(target)


@unlike
def test_bench(given: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "question.jsonl"
    text.write_text('{"question_id": 0, "category": "a", "turns": ["f(x)="]}\n')
    draft, rules = given.pop("draft"), bench.Rules(new_tokens=8, repeats=1)
    result = bench.measure("target", draft, [draft], [str(text)], 1, rules, compiled=False, **given)
    row = next(row for row in result.points[0].ran if row.name == f"assisted {draft}")
    assert row.error is None and row.warned is None
    assert f"assisted {draft}" in table(result)


@unlike
def test_doctor(given: dict[str, Any]) -> None:
    pair = AssistedModelForCausalLM.from_pretrained("target", **given)
    settings = Settings(prompts=1, new_tokens=12, longest=3, seconds=1.0, contexts=(20,))
    drafts = {given["draft"]: given["draft"]}
    quantization = given.get("draft_quantization")
    found = examine(pair.target, drafts, pair.tokenizer, __file__, settings, draft_quantization=quantization)
    assert found.drafts[0].error is None
    assert given["draft"] in told(found)


def test_servers_refuse_the_head(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vLLM cannot draft with 'small:head': use a draft model, an EAGLE-3 head"):
        hand_over("vllm", folders / "target", tmp_path, draft="small:head")


def test_the_usual_drafts_have_its_sample(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(folders / "target")
    assert "small:head" not in default_drafts(pair, None)
    monkeypatch.setattr(METHODS["small"], "sample", "small:head")
    assert default_drafts(pair, None)["small:head"] == "small:head"


def test_names_are_listed(site: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a method .*suffix, .*small.* nor a folder"):
        parse("nothing")
    with pytest.raises(ValueError, match=r"int8, int4, .*int8-plain"):
        find("int3")
    with pytest.raises(ValueError, match=r'"adaptive", .*"alternating"'):
        lengths.resolve("never")


def test_what_fails_costs_its_own_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point that raises, one that is something else, and one that takes a name of this package."""
    (tmp_path / "broken.py").write_text("import assisted\nclass Suffix(assisted.Suffix): name = 'suffix'\n")
    points = [
        "absent = nowhere:Method",
        "another = broken:assisted",
        "nameless = broken:Suffix",
        "suffix = broken:Suffix",
    ]
    monkeypatch.syspath_prepend(install(tmp_path, "broken", "\n".join(["[assisted.methods]", *points])))
    with pytest.warns(UserWarning) as caught:
        assert METHODS["suffix"] is Suffix and list(METHODS)[:2] == ["suffix", "ngram"]
    messages = [str(one.message) for one in caught if "assisted.methods" in str(one.message)]
    for name, reason in (
        ("absent", "'nowhere:Method' raised ModuleNotFoundError"),
        ("another", "TypeError: .* is not a subclass"),
        ("nameless", r"ValueError: Suffix needs @register\('nameless'\)"),
        ("suffix", "ValueError: 'suffix' is the name of <class 'assisted.methods.suffix.draft.Suffix'>"),
    ):
        assert sum(re.search(f"{name!r} cannot be used.*{reason}", message) is not None for message in messages) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not METHODS.keys() & {"absent", "another", "nameless"}
