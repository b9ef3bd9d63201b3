"""Methods that nothing else names: without its file or folder, everything else works as before."""

import importlib
import shutil
from pathlib import Path

import fresh
import pytest

import assisted
from assisted.moved import MOVED

PACKAGE = Path(assisted.__file__).parent
WITHOUT = {
    "early_exit": ["early-exit"],
    "layer_skip.py": ["layer-skip"],
    "medusa": ["medusa"],
    "merged.py": ["merged"],
    "other_tokenizer": [],
    "recycle.py": ["recycle"],
}
"""Of files and folders in methods/, the methods that go with them."""
REST = """
import os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM

def require_rest(folder, gone):
    sys.path.insert(0, folder)
    import assisted
    from assisted.methods import METHODS
    assert assisted.__file__.startswith(folder), assisted.__file__
    assert not set(gone) & set(METHODS), sorted(METHODS)
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    target = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids = torch.randint(5, 90, (2, 7))
    plain = target.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    drafts = [target, "suffix", "ngram", "recycle", "early-exit:1", "layer-skip", "self:int8", ["suffix", target]]
    for draft in drafts:
        if not (isinstance(draft, str) and draft.partition(":")[0] in gone):
            pair = assisted.AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3)
            assert torch.equal(pair.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0), plain), draft
    for name in gone:
        try:
            assisted.AssistedModelForCausalLM.from_models(target, draft=f"{name}:1")
        except (ValueError, OSError) as error:
            assert "draft" in str(error), error
        else:
            raise AssertionError(name)

for place, gone in WITHOUT.items():  # each in a process of its own, which need not import torch again
    if (child := os.fork()) == 0:
        require_rest(os.path.join(sys.argv[1], place), gone)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, place
"""


def test_a_deleted_method_leaves_the_rest(tmp_path):
    for place in WITHOUT:
        copy = tmp_path / place / "assisted"
        shutil.copytree(
            PACKAGE, copy, ignore=shutil.ignore_patterns("*.safetensors")
        )  # the compiled code is still right
        gone = copy / "methods" / place
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    ran = fresh.run(f"WITHOUT = {WITHOUT}\n{REST}", tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]


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
