"""Products with frozen weights are rounded to bfloat16 where nothing of the weights is lost, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from pairs import BY_NAME
from torch import nn

from assisted.methods.eagle.train import EagleSettings, EagleTraining
from assisted.methods.mtp.train import MTPSettings, MTPTraining
from assisted.methods.shared.training import features as frozen
from assisted.methods.shared.training.features import (
    Features,
    RoundedLayers,
    fits_bfloat16,
    plain_output,
    rounded_products,
)

SETTING = torch.backends.mkldnn.matmul


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(frozen, "has_matrix_units", lambda: True)


def of_bfloat16(**fields):
    return build(BY_NAME["llama"], **fields).bfloat16().float()


def test_weights_of_a_float32_checkpoint_are_not_rounded(with_units):
    assert fits_bfloat16(of_bfloat16())
    assert not fits_bfloat16(build(BY_NAME["llama"]))
    assert not fits_bfloat16(of_bfloat16().bfloat16())


def test_nothing_is_rounded_without_matrix_units(monkeypatch):
    monkeypatch.setattr(frozen, "has_matrix_units", lambda: False)
    assert not fits_bfloat16(of_bfloat16())


@pytest.mark.parametrize("rounded", [False, True])
def test_the_setting_is_what_it_was(rounded):
    before = SETTING.fp32_precision
    with pytest.raises(KeyError), rounded_products(rounded):
        assert SETTING.fp32_precision == ("bf16" if rounded else before)
        raise KeyError
    assert SETTING.fp32_precision == before


def test_products_of_layers_alone(monkeypatch):
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append(SETTING.fp32_precision)
            return x

    before = SETTING.fp32_precision
    with RoundedLayers():
        nn.Sequential(nn.Linear(4, 4), Watched())(torch.ones(1, 4))
    assert seen == [before]


def test_features_differ_by_rounding(with_units):
    target, ids = of_bfloat16(), torch.randint(3, 90, (2, 16))
    features = Features(target, [2])
    assert features.rounded
    found = features(ids)
    features.rounded = False
    exact = features(ids)
    torch.testing.assert_close(found.logits, exact.logits, rtol=0, atol=0.05 * float(exact.logits.abs().max()))
    assert not Features(target, [2], compiled=True).rounded
    assert not Features(build(BY_NAME["llama"]), [2]).rounded


def test_which_outputs_are_plain():
    output = nn.Linear(4, 8)
    assert not plain_output(output)  # it is trained
    assert plain_output(output.requires_grad_(False))
    output.register_forward_hook(lambda *given: None)
    assert not plain_output(output)
    assert not plain_output(type("Other", (nn.Linear,), {})(4, 8).requires_grad_(False))
    assert not plain_output(None)


@pytest.mark.parametrize("kind", ["mtp", "eagle-1"])
def test_rounded_trainings_have_nearly_the_same_gradients(kind, monkeypatch):
    """With and without rounding, and with an output layer that is not known to be plain."""
    found = []
    for how in ("rounded", "float32", "hooked"):
        target = of_bfloat16(num_hidden_layers=4)
        monkeypatch.setattr(frozen, "has_matrix_units", lambda: how == "rounded")  # noqa: B023
        made = {
            "mtp": lambda t=target: MTPTraining(t, MTPSettings(unroll=2)),
            "eagle-1": lambda t=target: EagleTraining(t, EagleSettings(version=1)),
        }[kind]()
        if how == "hooked":
            target.get_output_embeddings().register_forward_hook(lambda *given: None)
        torch.manual_seed(0)
        loss = made.loss(torch.randint(3, 90, (2, 16)), 0)
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in made.trained()])))
    (near, by_near), (plain, by_plain), (hooked, by_hooked) = found
    assert near == pytest.approx(plain, rel=0.05)  # the tiny model has large logits
    assert hooked == pytest.approx(plain, rel=1e-5)
    if kind == "eagle-1":  # the other's gradients at random weights change by a third with any rounding
        assert torch.cosine_similarity(by_near, by_plain, 0) > 0.99
    torch.testing.assert_close(by_hooked, by_plain, rtol=1e-4, atol=1e-5)
