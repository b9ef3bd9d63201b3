"""How every test runs: offline, on few threads, and skipped with a reason where the machine lacks what it needs."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub or torch: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ASSISTED_COSTS"] = ""  # what one test measures is nothing to another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest

LATER = {"dbrx", "deepseek_v32", "lfm2", "olmo_hybrid", "recurrent_gemma", "zamba"}
"""Architectures that transformers before 5.17 cannot run, or not over several tokens at once, in the tests' small sizes."""
QUANT_BACKENDS = ("bitsandbytes", "optimum.quanto", "torchao")

PROCESSORS: dict[str, tuple[str, ...]] = {
    "AVX2": ("avx2", "fma"),
    "AVX2 with VNNI": ("avx2", "fma", "avx_vnni"),
    "AVX512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"),
    "AVX512 with VNNI": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx512_vnni"),
    "AVX512 with bfloat16": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx512_bf16", "avx512_vnni"),
    "none of these": (),
}

# the same examples every time: a change that fails is to blame itself
hypothesis.settings.register_profile("same-examples", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same-examples")

# torch, transformers and the package are imported where they are used: the process that starts workers does without them.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)  # workers that share cores spend their time waiting for each other otherwise


@pytest.fixture
def invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of the loop checks that slots and text agree."""
    monkeypatch.setattr("assisted.decoding.CHECK_INVARIANTS", True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Makes a package with a name and a source, and imports it instead of an installed one, for the rest of the test."""

    def made(name: str, source: str) -> Any:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, name, None)  # whatever is there now comes back afterwards
        del sys.modules[name]
        return importlib.import_module(name)

    return made


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compiled as for a processor that can do less."""
    import torch

    from assisted.fast import native

    names = PROCESSORS[request.param]
    if not native.processor_flags().issuperset(names):
        pytest.skip("this processor cannot run them")
    monkeypatch.setattr(native, "PROCESSORS", (names,))
    native.loaded.cache_clear()
    try:
        assert native.is_available() and native.is_available(torch.float32)
        yield
    finally:
        native.loaded.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch
    import transformers
    from architectures import RECURRENT

    from assisted.engine.libraries import STATE_LAYERS

    lacking = {}
    if not torch.accelerator.is_available():
        lacking["gpu"] = "no accelerator here"
    missing = [name for name in QUANT_BACKENDS if not _installed(name)]
    if missing:
        lacking["quant"] = f"not installed: {', '.join(missing)} (pip install '.[quant,torchao]')"
    if not STATE_LAYERS:
        lacking["states"] = "this version of transformers has other layers for recurrent states"
        recurrent = {architecture.name for architecture in RECURRENT}
        for item in items:
            if "test_recurrent" in item.nodeid or recurrent.intersection(re.split(r"[\[\]-]", item.name)):
                item.add_marker("states")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
        for item in items:
            if LATER.intersection(re.split(r"[\[\]-]", item.name)):
                item.add_marker(pytest.mark.skip(reason="not in this version of transformers"))
    for item in items:
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is there now stays: thousands of tests and the modules need not be looked through at every collection of garbage."""
    gc.collect()
    gc.freeze()


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False
