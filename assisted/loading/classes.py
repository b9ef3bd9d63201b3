"""Which of transformers' Auto classes loads a checkpoint: that of the class which its config names."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
)

_OTHERS: tuple[tuple[Any, Any], ...] = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
)


def auto_class(config: PretrainedConfig) -> Any:
    """AutoModelForCausalLM; or, for a checkpoint of such a class, AutoModelForImageTextToText, AutoModelForSeq2SeqLM or
    AutoModelForSpeechSeq2Seq.

    A config that names no class counts as a causal LM's if there is one for it. An encoder-decoder is never loaded as its
    decoder alone.
    """
    kind, named = type(config), config.architectures or []
    of_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    for auto, mapping in _OTHERS:
        if kind in mapping and (mapping[kind].__name__ in named or not of_text):
            return auto
    return AutoModelForCausalLM
