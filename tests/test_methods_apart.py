"""Methods that nothing else names: without its file or folder, everything else works as before."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import assisted
from assisted.moved import MOVED

PACKAGE = Path(assisted.__file__).parent
REST = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import assisted
from assisted.moved import MOVED
from assisted.methods import METHODS
from transformers import LlamaConfig, LlamaForCausalLM
assert assisted.__file__.startswith(sys.argv[1]), assisted.__file__
assert not set(sys.argv[3:]) & set(METHODS), sorted(METHODS)
torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
target = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids = torch.randint(5, 90, (2, 7))
plain = target.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
drafts = [target, "suffix", "ngram", "recycle", "early-exit:1", "layer-skip", "self:int8", ["suffix", target]]
ran = 0
for draft in drafts:
    if not (isinstance(draft, str) and draft.partition(":")[0] in sys.argv[3:]):
        pair = assisted.AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3)
        assert torch.equal(pair.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0), plain), draft
        ran += 1
for name in sys.argv[3:]:
    try:
        assisted.AssistedModelForCausalLM.from_models(target, draft=f"{name}:1")
    except (ValueError, OSError) as error:
        assert "draft" in str(error), error
    else:
        raise AssertionError(name)
print(ran)
"""


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("early_exit", ["early-exit"]),
        ("layer_skip.py", ["layer-skip"]),
        ("medusa", ["medusa"]),
        ("merged.py", ["merged"]),
        ("other_tokenizer", []),
        ("recycle.py", ["recycle"]),
    ],
)
def test_a_deleted_method_leaves_the_rest(place, names, tmp_path):
    copy = tmp_path / "assisted"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    gone = copy / "methods" / place
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    ran = subprocess.run(
        [sys.executable, "-c", REST, str(tmp_path), place, *names],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout.split()[-1]) >= 7


@pytest.mark.parametrize("old", [name for name in MOVED if name not in ("drafters", "heads", "training")])
def test_an_old_name_of_a_module_gives_the_same_module(old):
    assert importlib.import_module(f"assisted.{old}") is importlib.import_module(f"assisted.{MOVED[old]}")


def test_a_package_that_has_moved_exports_what_it_did():
    from assisted.drafters import Suffix, parse

    from assisted import drafters, heads

    assert (drafters.Suffix, drafters.parse) == (Suffix, parse)
    assert importlib.import_module("assisted.heads.eagle").EagleHead is heads.eagle.EagleHead
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("assisted.drafters.nothing")
