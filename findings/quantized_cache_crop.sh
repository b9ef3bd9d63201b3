#!/usr/bin/env bash
# transformers 5.23.0, optimum-quanto 0.2.7, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; transformers 5.24.0 does the same, but for the
# last line.
#
# A QuantizedCache has `crop`, `batch_repeat_interleave` and `batch_select_indices` of DynamicCache, and `is_croppable` is True, but they know
# only of the newest tokens, which are kept unquantized until there are `residual_length` of them.
# - `crop(-2)` takes two of these away and leaves the length that the cache tells as it was: the next token gets the position of one two
#   places later, with other logits, and no warning. If fewer than two are there, it takes away these and returns, too.
# - Right after the newest tokens have been quantized, and always with the backend "fp8", `crop` raises an IndexError.
# - The other two change the newest tokens alone and return. The next forward pass raises a RuntimeError.
# `reorder_cache`, for beams, is right. Prompt lookup with `cache_implementation="quantized"` therefore raises the IndexError; 5.24.0 refuses it
# in words.
#
# Output seen, where "apart" is the largest difference of logits to a cache that never read the tokens, in their standard deviations:
#   quanto, 2 of 4 unquantized tokens removed: length 16 before, 16 after, apart by more than 1: True
#   quanto, 2 of 1 unquantized tokens removed: length 13 before, 13 after, apart by more than 1: True
#   quanto, 2 of 0 unquantized tokens removed: IndexError
#   fp8: IndexError
#   batch_repeat_interleave: returns, the next pass raises RuntimeError
#   prompt lookup: IndexError
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 optimum-quanto==0.2.7
"$work/env/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

torch.manual_seed(0)
SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
QUANTO = dict(nbits=4, q_group_size=16, residual_length=8)
PROMPT = 12
model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.2)
ids = torch.randint(3, 60, (1, 6)).repeat(1, 4)


def read(count, backend="quanto", rows=1, **options):
    cache = QuantizedCache(backend=backend, config=model.config, **options)
    with torch.no_grad():
        model(ids[:, :PROMPT].repeat(rows, 1), past_key_values=cache)
        for at in range(PROMPT, count):
            model(ids[:, at : at + 1].repeat(rows, 1), past_key_values=cache)
    return cache


def logits(cache, at, rows=1):
    with torch.no_grad():
        return model(ids[:, at : at + 1].repeat(rows, 1), past_key_values=cache).logits


def removed(count, backend="quanto", **options):
    cache = read(count, backend, **options)
    before = cache.get_seq_length()
    try:
        cache.crop(-2)
    except IndexError:
        return "IndexError"
    right = logits(read(count - 2, backend, **options), count - 2)
    after, apart = cache.get_seq_length(), (logits(cache, count - 2) - right).abs().max() / right.std()
    return f"length {before} before, {after} after, apart by more than 1: {bool(apart > 1)}"


found = []
for unquantized in (4, 1, 0):
    found.append(removed(PROMPT + (unquantized or QUANTO["residual_length"]), **QUANTO))
    print(f"quanto, 2 of {unquantized} unquantized tokens removed: {found[-1]}")
found.append(removed(PROMPT + 4, "fp8"))
print(f"fp8: {found[-1]}")
cache = read(PROMPT + 1, rows=2, **QUANTO)
cache.batch_repeat_interleave(3)
try:
    logits(cache, PROMPT + 1, rows=6)
except RuntimeError:
    print("batch_repeat_interleave: returns, the next pass raises RuntimeError")
else:
    raise SystemExit("batch_repeat_interleave: no error")
quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", **QUANTO}, "max_new_tokens": 30, "do_sample": False}
plain = {"eos_token_id": None, "pad_token_id": 0, **quantized}
model.generate(ids, **plain)
try:
    model.generate(ids, **plain, prompt_lookup_num_tokens=5)
except IndexError:
    print("prompt lookup: IndexError")
else:
    raise SystemExit("prompt lookup: no error")
wrong = [f"length {length} before, {length} after, apart by more than 1: True" for length in (16, 13)]
assert found == [*wrong, "IndexError", "IndexError"]
PY
