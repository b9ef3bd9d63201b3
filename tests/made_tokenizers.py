"""Small tokenizers that write text in different ways: characters, bytes (GPT-2) and SentencePiece's pieces with "▁".

For the tests of drafting across tokenizers. Knows nothing of what they ask.
"""

from __future__ import annotations

import functools
import inspect
import json
import random

from architectures import VOCABULARY
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["byte_level", "characters", "pieces"]

SPECIAL = ("<pad>", "<s>", "</s>")


def characters(
    merges: tuple[str, ...] = (),
    swapped: int = 0,
    entries: int = VOCABULARY,
    first: str = "!",
    special: tuple[str, ...] = SPECIAL,
    bos: bool = False,
) -> PreTrainedTokenizerFast:
    """A token for each special name, character from `first` on, and pair of them in `merges`; `entries` in all.

    swapped: so many tokens behind the special ones have changed places with those next to them. bos: prompts begin with
    the second special token.
    """
    alphabet = [chr(ord(first) + place) for place in range(entries - len(special) - len(merges))]
    for place in range(0, 2 * swapped, 2):
        alphabet[place], alphabet[place + 1] = alphabet[place + 1], alphabet[place]
    vocabulary = {token: number for number, token in enumerate((*special, *alphabet, *merges))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in merges]))
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{special[1]} $A", special_tokens=[(special[1], 1)]
        )
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=list(special[3:]), **names)


@functools.cache
def byte_level(entries: int = 400, bos: bool = False) -> PreTrainedTokenizerFast:
    """Every text is bytes; spaces go with the word behind them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(inspect.getsource(random).splitlines(keepends=True), trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")


@functools.cache
def pieces(scheme: str = "legacy", entries: int = 700) -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces are "▁", one is put before a text, other characters fall back to bytes.

    scheme: "legacy" (a normalizer puts the space there, as in Llama 2), or "first" or "always" (a pre-tokenizer does).
    """
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=entries - 256, special_tokens=["<unk>", "<s>", "</s>"])
    backend.train_from_iterator(inspect.getsource(random).splitlines(), trainer)
    written = json.loads(backend.to_str())
    vocabulary = written["model"]["vocab"]
    for value in range(256):
        vocabulary[f"<0x{value:02X}>"] = len(vocabulary)
    backend = Tokenizer.from_str(json.dumps(written))
    if scheme == "legacy":
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
