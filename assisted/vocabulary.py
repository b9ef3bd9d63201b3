"""Whether two models read the same tokens.

Knows tokenizers and vocabulary sizes. Equal sizes prove nothing: the token -> id maps are compared.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["find_tokenizer", "require_same"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_tokenizer(path: str | None, **hub: object) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, None where a folder has none or a Hub id offers none."""
    if not path:
        return None
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, **hub)
    except (OSError, ValueError, KeyError, ImportError):  # no tokenizer there, or one this machine cannot build
        return None


def require_same(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse a draft whose tokens mean something else than the target's.

    Vocabularies of one tokenizer padded to different sizes are the same. Raises ValueError that says what differs.
    """
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if target_tokenizer is None or draft_tokenizer is None:
        if sizes[0] == sizes[1]:
            return
        missing = "tokenizer" if target_tokenizer is None else "draft_tokenizer"
        raise ValueError(
            f"draft: its vocabulary has {sizes[1]} entries, the target's {sizes[0]}, and without both tokenizers it can't "
            f"be told whether one is a padded form of the other. Pass {missing}=AutoTokenizer.from_pretrained(...)."
        )
    # Added tokens may differ between the models of a family, as long as those that both have agree. A smaller vocabulary
    # learned from the same text is another tokenizer although its ids agree: it cuts the text into other pieces.
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    agree = all(theirs.get(token, number) == number for token, number in ours.items())
    if agree and _learned(target_tokenizer) == _learned(draft_tokenizer):
        return
    shared = sum(token in ours for token in theirs)
    problem = (
        "shares no token with the target's"
        if shared == 0
        else (f"gives other ids than the target's, or knows other tokens ({shared} of {len(ours)} shared)")
    )
    raise ValueError(
        f"draft: its tokenizer {problem}. Drafting across tokenizers is not available yet; choose a draft trained with the "
        "target's tokenizer, such as a smaller model of the same family."
    )


def _learned(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens of the vocabulary itself, those added later left out."""
    return tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
