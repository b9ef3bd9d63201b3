"""The install line in error messages fits the way in which the package was installed."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from assisted import extras

URL = "https://example.org/assisted"
COMMIT = "0" * 40


class _Installed:
    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    "origin, line",
    [
        (None, 'pip install "assisted[quant]"'),
        ({"url": "file:///a/my%20clone", "dir_info": {}}, 'pip install "/a/my clone[quant]"'),
        ({"url": "file:///a/clone", "dir_info": {"editable": True}}, 'pip install -e "/a/clone[quant]"'),
        ({"url": f"{URL}.whl", "archive_info": {}}, f'pip install "assisted[quant] @ {URL}.whl"'),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f'pip install "assisted[quant] @ git+{URL}@{COMMIT}"',
        ),
    ],
    ids=["index", "clone", "editable", "archive", "repository"],
)
def test_the_line_names_where_the_package_came_from(
    origin: dict[str, Any] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: _Installed(origin))
    assert extras.install("quant") == line
    if " @ " in line:
        assert Requirement(line.split('"')[1]).extras == {"quant"}


def test_a_clone_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    line = extras.install("gguf")
    assert (Path(line.split('"')[1].removesuffix("[gguf]")) / "assisted" / "extras.py").is_file()


def test_messages_name_extras_that_exist() -> None:
    """No message has a line of its own, and every extra that a message names is one of pyproject.toml's."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

    root = Path(extras.__file__).parents[1]
    known = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = {path: path.read_text(encoding="utf-8") for path in (root / "assisted").rglob("*.py")}
    named = {extra for text in sources.values() for extra in re.findall(r"""\binstall\(["'](\w+)["']\)""", text)}
    assert {"gguf", "demo"} <= named <= set(known)
    assert not [path.name for path, text in sources.items() if "assisted[" in text and path.name != "__init__.py"]


def test_records_of_packages_are_read_again_after_an_installation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    known = extras.entry_points
    monkeypatch.setattr(extras, "entry_points", lambda group: read.append(group) or known(group=group))
    monkeypatch.syspath_prepend(tmp_path)
    registry: extras.Registry[Any] = extras.Registry("tests.nothing", lambda name, entry: None)
    for _ in range(3):
        assert not list(registry) and "dumps" not in registry
    assert read == ["tests.nothing"]
    record = tmp_path / "later-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[tests.nothing]\ndumps = json:dumps\n")
    assert registry["dumps"] is json.dumps and list(registry) == ["dumps"]
    assert read == ["tests.nothing"] * 2
