"""The repository's address, for notebooks and pages: `repo_url` in mkdocs.yml, empty until there is one.

Sources say REPOSITORY for it, with a sentence that explains the word. Once there is an address, both give way to it.
"""

from __future__ import annotations

import re
from pathlib import Path

BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
EXPLAINED = re.compile(r" `?REPOSITORY`? is the address of [^.:\n]*(?=[.:])[.:]")


def repository() -> str:
    """The address without a slash at its end, or ""."""
    settings = (Path(__file__).resolve().parent.parent / "mkdocs.yml").read_text(encoding="utf-8")
    return re.search(r"^repo_url: *[\"']?([^\s\"'#]*)", settings, re.MULTILINE)[1].rstrip("/")


def addressed(text: str, address: str) -> str:
    """The text with the address, or unchanged without one."""
    return EXPLAINED.sub("", text).replace("REPOSITORY", address) if address else text


def colab(place: str, address: str) -> str:
    """Where Colab opens a file of the repository; "" for a repository that is not on GitHub, which Colab cannot read."""
    _, _, name = address.partition("github.com/")
    return f"https://colab.research.google.com/github/{name}/blob/main/{place}" if name else ""
