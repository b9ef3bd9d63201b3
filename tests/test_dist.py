"""What is published: libraries that are compiled before they are installed, and wheels that hold everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from assisted.fast import native, variants

ROOT = Path(__file__).parents[1]
HAS_KERNELS = sys.platform == "linux" and native.is_available(torch.float32)
needed = pytest.mark.skipif(not HAS_KERNELS, reason=native.loaded(torch.float32)[1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The library for this processor in float32, as a wheel has it, and what it is."""
    folder, used = tmp_path_factory.mktemp("wheel"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            native, "prebuilt_or_compiled", lambda one: (used.append(one), native.compiled(one.source, one.flags))[1]
        )
        native.loaded.cache_clear()
        native.loaded(torch.float32)
        patch.setattr(variants, "all_of", lambda *system: used)
        variants.build(folder, "linux", os.uname().machine, (os.environ.get("CC") or "cc").split())
    native.loaded.cache_clear()
    return SimpleNamespace(folder=folder, variant=used[0])


@needed
@torch.no_grad()
def test_a_wheels_library_has_the_bits_of_one_that_is_compiled(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, columns = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)), torch.randn(5, 160)
    made = []
    for folder in (Path("nowhere"), built.folder):
        monkeypatch.setattr(variants, "PREBUILT", folder)
        native.loaded.cache_clear()
        made.append(native.NativeProduct(native.packed(weight), 160, 32)(columns))
        monkeypatch.setenv("PATH", "")  # no compiler
        monkeypatch.setenv("CC", "")
    assert str(built.folder) in str(native.loaded(torch.float32)[0])
    native.loaded.cache_clear()
    assert torch.equal(*made)
    assert b"libgomp" not in variants.library(built.variant).read_bytes()  # torch brings the runtime of threads


@needed
@pytest.mark.parametrize("state", ["of other sources", "broken"])
def test_a_library_that_does_not_fit_is_refused_with_a_reason(
    state: str, built: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(variants, "PREBUILT", tmp_path)
    file = variants.library(built.variant)
    if state == "broken":
        file.write_bytes(b"no library")
    else:
        monkeypatch.setattr(variants, "stamp", lambda: "0" * 16)
    assert native.prebuilt_or_compiled(built.variant)[1] == ""  # then it is compiled
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    library, reason = native.prebuilt_or_compiled(built.variant)
    why = {
        "of other sources": f"this installation has no {file.name} that was made from its own sources; no C compiler",
        "broken": f"{file.name} of this installation cannot be loaded (",
    }
    assert library is None and reason.startswith(why[state]) and "no C compiler was found" in reason


@pytest.mark.parametrize(
    "system,machine,without",
    [
        ("linux", "x86_64", set()),
        ("linux", "aarch64", set()),
        ("macosx", "arm64", {"native-bfloat16", "native-float32"}),  # each has dot products
        ("win", "amd64", {"native-bfloat16-" + "-".join(variants.PROCESSORS[0])}),  # AMX
    ],
)
def test_each_kind_of_processor_has_libraries(system: str, machine: str, without: set[str]) -> None:
    is_arm = variants.MACHINES[machine]
    expected = {
        variants.of_native(needs, is_arm, small).name
        for needs in (variants.ARM if is_arm else variants.PROCESSORS)
        for small in (False, True)
    }
    made = variants.all_of(system, machine)
    assert {one.name for one in made} == expected - without and len(made) == len(expected - without)
    for one in made:
        assert set(one.needs) <= set(one.name.split("-")) and (variants.KERNELS / one.source).is_file()


def test_other_machines_get_a_wheel_without_libraries() -> None:
    with pytest.raises(ValueError, match="the libraries in C are not for linux on riscv64"):
        variants.all_of("linux", "riscv64")


ALONE = """
import json, re, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from assisted import AssistedModelForCausalLM
from assisted.fast import native
import assisted
sizes = dict(vocab_size=320, num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2)
told = []
for dtype in native.DTYPES:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()
    pair = AssistedModelForCausalLM.from_models(model, draft="suffix")
    pair.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    told += pair.report.warnings
maps = open("/proc/self/maps").read()
libraries = [native.loaded(dtype)[0]._name for dtype in native.DTYPES]
runtimes = sorted(set(re.findall(r"/\\S*omp[-.\\d]\\S*", maps)))
print(json.dumps([assisted.__file__, libraries, told, runtimes]))
"""


@needed
@pytest.mark.slow
def test_a_wheel_brings_the_kernels_to_a_machine_without_a_compiler(tmp_path: Path) -> None:
    source, wheels, home = tmp_path / "source", tmp_path / "wheels", tmp_path / "home"
    shutil.copytree(ROOT / "assisted", source / "assisted", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(build, env={**os.environ, "ASSISTED_LIBRARIES": "1"}, check=True)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    with zipfile.ZipFile(wheel) as held:
        names = {name for name in held.namelist() if name.startswith("assisted/")}
    files = {str(file.relative_to(source)) for file in (source / "assisted").rglob("*") if file.is_file()}
    own = {variants.library(one) for one in variants.all_of("linux", os.uname().machine)}
    assert names == files | {f"assisted/fast/{file.relative_to(variants.HERE)}" for file in own}

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # whose own .pth files, for this clone, are not read
    bare = {"PATH": str(tmp_path / "nowhere"), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([python, "-c", ALONE], cwd=tmp_path, env=bare, capture_output=True, text=True, check=True)
    package, libraries, told, runtimes = json.loads(run.stdout.splitlines()[-1])
    assert not told and all(Path(one).is_relative_to(site) for one in (package, *libraries))
    assert len(runtimes) == 1 and "torch" in runtimes[0]
    assert not list(home.rglob("*.so"))
