"""Tests speak to the package through its public names: a list of the private ones that some still use, which only shrinks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import assisted

pytestmark = pytest.mark.documents

HERE = Path(__file__).parent
OF_OTHERS = {"_fields_", "_attn_implementation", "_parameters", "_repr_html_", "_sample"}
"""Names of Python, torch and transformers, and of IPython's protocol, which the package uses as well."""

STILL_USED: dict[str, set[str]] = {
    "running.py": {"_WIDE"},
    "test_acceptance_tree.py": {"_choose"},
    "test_bench.py": {"_Counter", "_with_assistant"},
    "test_cache.py": {"_GROWTH"},
    "test_cli.py": {"_EXAMPLES", "_MODELS", "_brought", "_console", "_parser"},
    "test_compiled.py": {"_WIDE"},
    "test_counts.py": {"_forward"},
    "test_distribution.py": {"_NOT_YET", "_PREFIX_FREE", "_PREFIX_READING", "_apply"},
    "test_doctor.py": {"_near", "_quick", "_way"},
    "test_early_exit.py": {"_is_own_file", "_measure"},
    "test_fused.py": {"_ALWAYS", "_WIDE", "_near"},
    "test_fused_head.py": {"_First"},
    "test_fuzz.py": {"_positions"},
    "test_gguf.py": {"_build_fields"},
    "test_graphs.py": {"_AHEAD", "_BROKEN", "_is_own_file", "_leave", "_settings"},
    "test_handover.py": {"_interleaved"},
    "test_layer_skip.py": {"_try_change"},
    "test_libraries.py": {"_eight_bits", "_prefill"},
    "test_low_bit.py": {"_device_type"},
    "test_medusa.py": {"_tree"},
    "test_other_tokenizer.py": {"_Choice", "_as_text", "_read_committed"},
    "test_plan.py": {"_states_by_config"},
    "test_pool.py": {"_entries", "_slots"},
    "test_products.py": {"_ALWAYS", "_LARGE", "_WIDE"},
    "test_prompts.py": {"_PRICE_CPU"},
    "test_quantization.py": {"_lib"},
    "test_recurrent.py": {"_LAG", "_saved"},
    "test_remembered.py": {"_MOST", "_WRITTEN"},
    "test_robustness.py": {"_GROWTH", "_LEAST_GROWTH", "_grown"},
    "test_runtime.py": {"_forward"},
    "test_session.py": {"_GROWTH", "_grown", "_slots"},
    "test_signatures.py": {"_obstacle_of_slots"},
    "test_sources.py": {"_WIDE", "_checksum_by_parts"},
    "test_tensor_parallel.py": {"_is_own_file"},
    "test_training.py": {"_ROWS", "_exit_logits", "_features", "_inputs", "_run", "_unrolled"},
    "test_training_chats.py": {"_REQUESTS", "_read", "_rendered", "_write"},
    "test_training_commands.py": {"_MODELS"},
    "test_zoo.py": {"_step"},
}
"""Private names of the package by test file. A new one is an error, and so is one here that its test no longer uses."""


def test_no_test_starts_to_use_a_private_name() -> None:
    own = {name for path in Path(assisted.__file__).parent.rglob("*.py") for name in private(defined(tree(path)))}
    used: dict[str, set[str]] = {}
    for path in sorted(HERE.rglob("*.py")):
        if found := own.intersection(private(asked_for(tree(path)))) - OF_OTHERS:
            used[path.name] = found
    new = {file: names - STILL_USED.get(file, set()) for file, names in used.items()}
    gone = {file: names - used.get(file, set()) for file, names in STILL_USED.items()}
    assert not {file: names for file, names in new.items() if names}, "ask a public function of the package instead"
    assert not {file: names for file, names in gone.items() if names}, "take these out of STILL_USED"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def private(names: Iterator[str]) -> set[str]:
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def defined(module: ast.Module) -> Iterator[str]:
    """Names that a file gives to something."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def asked_for(module: ast.Module) -> Iterator[str]:
    """Names that a file imports, looks up in something other than itself, or gives to `setattr` and `getattr`."""
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=str(home), names=names) if home.startswith("assisted"):
                yield from (alias.name for alias in names)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called.endswith("attr"):
                texts = (one.value for one in args if isinstance(one, ast.Constant) and isinstance(one.value, str))
                yield from (text.rpartition(".")[2] for text in texts)
