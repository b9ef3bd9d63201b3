#!/bin/sh
# outlines-core 0.2.14: after a text that matches, a token that makes it incomplete again is forbidden.
#
# The regular expression 1(\.[0-9]+)? matches "1" and "1.5". With a vocabulary in which digits and the point are tokens of
# their own, as in those of Qwen and SmolLM2, an Index allows only the end token after "1", so that "1.5" cannot be written.
# JSON's number, {"type": "number"}, ends the same way when it stands alone; within an array it does not, because the text is
# not complete there. With ".5" as one token, "1.5" can be written.
# Seen: a regular expression's automaton reports a match one byte late. Index takes a state that reports one for a complete
# text, and drops it since the text cannot end there.
#
# Output seen on 2026-11-28:
#   after "1" by single characters: ['<end>']
#   after "1" with ".5" as a token: ['.5', '<end>']
#   after "[1", in an array: ['.', ']']
# Exits with another status than 0 if that has changed.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-deps outlines-core==0.2.14
"$folder/env/bin/python" - <<'EOF'
import re

from outlines_core import Index, Vocabulary

TEXTS = ["1", ".", "5", "[", "]"]


def after(text, expression, tokens):
    index = Index(expression, Vocabulary(0, {token: [number] for number, token in enumerate(tokens, start=1)}))
    state = index.get_initial_state()
    for character in text:
        state = index.get_next_state(state, 1 + tokens.index(character))
    return sorted(["<end>", *tokens][number] for number in index.get_allowed_tokens(state))


expression = r"1(\.[0-9]+)?"
assert re.fullmatch(expression, "1") and re.fullmatch(expression, "1.5")
single = after("1", expression, TEXTS)
print('after "1" by single characters:', single)
joined = after("1", expression, [*TEXTS, ".5"])
print('after "1" with ".5" as a token:', joined)
within = after("[1", r"\[1(\.[0-9]+)?\]", TEXTS)
print('after "[1", in an array:', within)
assert single == ["<end>"] and joined == [".5", "<end>"] and within == [".", "]"]
EOF
