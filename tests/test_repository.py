"""The files around the package agree with each other: versions, make targets, what continuous integration runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools import mutants

pytestmark = pytest.mark.documents

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]


def text(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_every_file_names_the_same_version() -> None:
    version = PROJECT["version"]
    released = re.search(r"^## (\d\S+) - (\S+)$", text("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(text("CITATION.cff"))
    assert released is not None and released[1] == version == citation["version"]
    assert released[2] == str(citation["date-released"])


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for path in [*WORKFLOWS, ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", ROOT / ".pre-commit-config.yaml"]:
        named = set(re.findall(r"(?:run: |entry: |^|`)make ([a-z-]+)", text(path), re.MULTILINE))
        assert named <= targets, path.name


def test_continuous_integration_runs_every_python_that_is_promised() -> None:
    matrix = yaml.safe_load(text(".github/workflows/tests.yml"))["jobs"]["tests"]["strategy"]["matrix"]["python"]
    promised = [re.search(r":: (3\.\d+)$", line) for line in PROJECT["classifiers"]]
    assert matrix == [found[1] for found in promised if found]
    assert PROJECT["requires-python"] == f">={matrix[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_ask_for_no_more_rights_than_they_need(path: Path) -> None:
    workflow = yaml.safe_load(text(path))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "write" not in job.get("permissions", {}).values() or "environment" in job
        assert "uses" in job or all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_forms_ask_for_something() -> None:
    for path in FORMS:
        form = yaml.safe_load(text(path))
        assert form["name"] and form["description"]
        assert all(part["attributes"]["label"] and part["type"] for part in form["body"])
        assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_pre_commit_formats_as_make_lint_does() -> None:
    hooks = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert f"ruff=={hooks[0]['rev'].removeprefix('v')}\n" in text("constraints.txt")


def test_every_mutant_is_found_in_its_file() -> None:
    """A text that is there no longer would stop `make mutants` at its start."""
    mutants.check(ROOT, mutants.MUTANTS)
