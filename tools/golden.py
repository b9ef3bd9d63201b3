"""What a change to the house must leave equal: tokens, forward passes and how they ran, and the public names and help texts.

    python -m tools.golden --write FILE        before the change
    python -m tools.golden --compare FILE      after it

Every way to draft of the fuzzer writes for a dozen architectures in float32 and bfloat16, greedily and sampled with a seed,
over two rows, with drafts of a fixed length. Tokens in bfloat16 depend on the processor, and so do seeded ones at near-ties:
both runs belong on one machine. Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import importlib
import inspect
import io
import json
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from architectures import build, random_ids  # noqa: E402

import assisted  # noqa: E402
from assisted import AssistedModelForCausalLM  # noqa: E402
from assisted.cli import main as cli  # noqa: E402
from tests.fuzz import drafts  # noqa: E402
from tests.fuzz.cases import BY_NAME  # noqa: E402

FAMILIES = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt2",
    "bloom",
    "phi",
    "mistral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5",
    "bamba",
)
CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}
NEW = 24
COMMANDS = (
    *("", "demo", "generate", "chat", "train", "train eagle", "bench", "doctor"),
    *("audit", "plan", "serve", "handover", "shrink-vocabulary", "zoo"),
)


def texts(name: str, family: str, dtype: torch.dtype) -> dict[str, Any]:
    """What one draft writes for one target: of each call a hash of its tokens, with the report's counts."""
    target = build(BY_NAME[family]).to(dtype)
    torch.manual_seed(0)
    try:
        draft = drafts.draft_for(name, target, copy.deepcopy(target))
        pair = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
    except (ValueError, ImportError) as error:
        return {"refused": str(error)}
    found = {}
    for call, arguments in CALLS.items():
        ids = random_ids(target, 2, 7, 12)
        torch.manual_seed(1)
        written = pair.generate(ids, max_new_tokens=NEW, pad_token_id=0, **arguments)
        report = pair.report
        assert report is not None
        found[call] = {
            "tokens": hashlib.sha256(written.numpy().tobytes()).hexdigest()[:16],
            "passes": report.target_passes,
            "drafted": report.drafted,
            "accepted": report.accepted,
            "ran as": report.passes,
            "way": report.way,
            "because": report.because,
        }
    return found


def face() -> dict[str, Any]:
    """The public names with their signatures, and every command's help."""
    names = {}
    for name in assisted.__all__:
        one = getattr(assisted, name)
        if inspect.isclass(one):
            members = {
                member: str(inspect.signature(value)) if callable(value) else "attribute"
                for member, value in inspect.getmembers(one)
                if not member.startswith("_") and str(getattr(value, "__module__", "")).startswith("assisted")
            }
            with contextlib.suppress(ValueError):
                names[name] = {"": str(inspect.signature(one)), **members}
    modules = {}
    for module in pkgutil.walk_packages(assisted.__path__, "assisted."):
        with contextlib.suppress(ImportError):  # of an extra
            if not module.name.endswith("__main__"):
                modules[module.name] = sorted(getattr(importlib.import_module(module.name), "__all__", ()))
    helps = {}
    for command in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([*command.split(), "--help"])
        helps[command] = out.getvalue()
    return {"names": names, "modules": modules, "help": helps}


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """The places where two golden files differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after}, key=str)
            for line in differences(before.get(key), after.get(key), f"{at}/{key}")
        ]
    return [] if before == after else [f"{at}: {before!r:.200} -> {after!r:.200}"]


def main() -> int:
    """Write a golden file, or compare with one. Returns 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--write", type=Path, metavar="FILE")
    to.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the differences as a JSON list")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"face": face(), "texts": {}}
    keys = [(n, f, d) for f in FAMILIES for d in (torch.float32, torch.bfloat16) for n in drafts.NAMES]
    for name, family, dtype in tqdm(keys):
        found["texts"][f"{family}, {str(dtype).removeprefix('torch.')}, {name}"] = texts(name, family, dtype)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1, sort_keys=True))
        return 0
    lines = differences(json.loads(options.compare.read_text()), found)
    print(json.dumps(lines) if options.json else "\n".join([*lines, f"{len(lines)} differences"]))
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
