"""Tiny random encoder-decoders, one per family, and what their encoders read. Nothing here knows about drafting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import SPECIAL, VOCABULARY, _spread
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedModel

BART = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 256, "decoder_start_token_id": 3, "forced_eos_token_id": None},
    **(SPECIAL | {"tie_word_embeddings": False}),
}
T5 = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0},
    **(SPECIAL | {"decoder_start_token_id": 3, "tie_word_embeddings": False}),
}
FRAMES = 24


@dataclass(frozen=True)
class Family:
    """Encoder-decoders of one kind.

    Args:
        name: the config's model type.
        fields: of the config.
        ragged: the decoder's rows may have lengths of their own in one forward pass; otherwise slots are right-aligned.
        speech: the encoder reads features of sound instead of tokens.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    ragged: bool = True
    speech: bool = False

    def build(self, seed: int = 0, **fields: Any) -> PreTrainedModel:
        """A float32 model in eval mode, whose input matters."""
        config = CONFIG_MAPPING[self.name](**(self.fields | fields))
        auto = AutoModelForSpeechSeq2Seq if self.speech else AutoModelForSeq2SeqLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(config).float().eval()
        _spread(model, torch.Generator().manual_seed(seed))
        return model

    def inputs(self, rows: int = 1, seed: int = 1) -> dict[str, torch.Tensor]:
        """What a tokenizer or a processor returns for a batch; tokens of all rows but the first are padded on the right."""
        draw = torch.Generator().manual_seed(seed)
        if self.speech:
            return {"input_features": torch.randn(rows, 8, FRAMES, generator=draw)}
        ids = torch.randint(6, 90, (rows, 14), generator=draw)
        mask = (torch.arange(14) < 14 - 2 * torch.arange(rows)[:, None]).long()
        return {"input_ids": ids.where(mask.bool(), SPECIAL["pad_token_id"]), "attention_mask": mask}


WHISPER = {
    **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
    **{"num_mel_bins": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 128},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}


FAMILIES = [
    Family("bart", BART),
    Family("marian", BART | {"decoder_vocab_size": VOCABULARY}),
    Family("mbart", BART),
    Family("pegasus", BART),
    Family("t5", T5, ragged=False),
    Family("mt5", T5, ragged=False),
    Family("umt5", T5, ragged=False),
    Family("whisper", WHISPER, speech=True),
]
BY_NAME = {family.name: family for family in FAMILIES}
