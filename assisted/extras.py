"""The command that adds an extra to this installation, for error messages.

Knows how the package was installed: from a package index, from an archive, or from a clone.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["install"]

NAME = "assisted"


def install(extra: str) -> str:
    """The command for an extra, which works from any folder."""
    try:
        origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a clone that is imported without being installed
        origin = {"dir_info": {}, "url": Path(__file__).parents[1].as_uri()}
    if not origin:
        return f'pip install "{NAME}[{extra}]"'
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {editable}"{unquote(urlsplit(origin["url"]).path)}[{extra}]"'
    repository = origin.get("vcs_info")
    url = f"{repository['vcs']}+{origin['url']}@{repository['commit_id']}" if repository else origin["url"]
    return f'pip install "{NAME}[{extra}] @ {url}"'
