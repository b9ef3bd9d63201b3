"""The zoo: models by the name `zoo:NAME`, which can stand wherever a path is taken. None needs the Hub.

The shipped ones are a target that writes Python, and two drafts and two kinds of heads for it; and a target with linear
attention, whose checkpoint has an MTP head (`draft="mtp"`). Heads are not models by themselves; pass them as `draft=`.
`zoo:smollm2`, a small instruct model, is in a package that is installed separately; a head for it, `zoo:smollm2-eagle3`, is
shipped.
"""

from __future__ import annotations

from pathlib import Path

from .packages import PACKAGED

__all__ = ["HEADS", "HEADS_OF_PACKAGED", "MODELS", "NAMES", "PACKAGED", "folder", "heads_of", "resolve"]

MODELS = ("target", "draft", "draft-other-tokenizer", "hybrid")
HEADS = ("eagle3", "medusa")
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
