"""Names of other packages that a version lacks cost a feature and a sentence, never an import."""

from __future__ import annotations

import textwrap

import fresh
import pytest
import torch
from architectures import ARCHITECTURES, build, random_ids

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.engine import libraries

LACKING = {
    "transformers": ["GgufConfig"],
    "transformers.cache_utils": [
        "DYNAMIC_LAYER_TYPE_MAPPING",
        "DummyLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    ],
    "torch": ["_convert_weight_to_int4pack_for_cpu", "_weight_int8pack_mm", "ops"],
}
"""By module, every name that `libraries` looks up and can do without."""


def test_a_missing_name_costs_a_feature_and_not_the_import() -> None:
    code = """
        import importlib, sys

        class Without:
            def __init__(self, module, names):
                self.module, self.names = module, names

            def __getattr__(self, name):
                if name in self.names:
                    raise AttributeError(name)
                return getattr(self.module, name)

        def found(name, package=None, real=importlib.import_module):
            ours = sys._getframe(1).f_globals["__name__"] == "assisted.engine.libraries"
            return Without(real(name, package), LACKING[name]) if ours and name in LACKING else real(name, package)

        importlib.import_module = found
        import torch
        from assisted import AssistedModelForCausalLM
        from assisted.engine import libraries

        pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=torch.float32)
        ids = torch.arange(5, 25)[None]
        same = torch.equal(pair.generate(ids, max_new_tokens=24), pair.target.generate(ids, max_new_tokens=24))
        print(same, pair.report.drafted > 0, *sorted(libraries.lost()))
    """
    done = fresh.run(f"LACKING = {LACKING!r}\n{textwrap.dedent(code)}")
    assert done.returncode == 0, done.stderr
    same, drafted, *lost = done.stdout.split()
    assert same == drafted == "True"
    for home, names in LACKING.items():
        assert all(any(name.startswith(f"{home}.{one}") for name in lost) for one in names)


def test_without_the_loop_every_call_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(ARCHITECTURES[0])
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix")
    ids = random_ids(target, 1, 9, 9)
    monkeypatch.setattr(libraries, "_prefill", None)
    with pytest.warns(DraftingStopped, match="this version of transformers has no"):
        text = pair.generate(ids, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(text, target.generate(ids, max_new_tokens=8, pad_token_id=0))
    assert pair.report.drafted == 0
    assert "this version of transformers" in (pair.report.because or "")


def test_a_mode_that_cannot_be_asked_for_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.active_modes() == []
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    assert libraries.active_modes()


def test_eight_bits_without_their_product() -> None:
    given, packed = torch.randn(3, 16).bfloat16(), torch.randint(-127, 128, (8, 16), dtype=torch.int8)
    scales = torch.rand(8).bfloat16()
    torch.testing.assert_close(
        libraries._eight_bits(given, packed, scales), libraries.int8_product(given, packed, scales), rtol=0.02, atol=0.5
    )


def test_a_callers_cache_may_have_either_name() -> None:
    kept = object()
    assert libraries.with_cache_renamed({"past_key_values": kept, "top_k": 3}) == {libraries.CACHE: kept, "top_k": 3}
    assert libraries.with_cache_renamed({libraries.CACHE: kept}) == {libraries.CACHE: kept}
