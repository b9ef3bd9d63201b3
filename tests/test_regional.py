"""Layers as compiled code, one code for all of them: made by another process, kept on disk, taken over between calls.

Where not marked slow, the code is the function that would be compiled.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME

from assisted import AssistedModelForCausalLM, decoding
from assisted.engine.prepared import CallSettings
from assisted.fast import fused, regional
from assisted.fast.exported import Code, arguments
from assisted.fast.regional import Form

FORM = Form(64, 96, 4, 2, 16, 1e-6, 0.25, False, (False,) * 4, 1)
needed = pytest.mark.skipif(regional.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Also for tiny models, and in a folder of the test."""
    monkeypatch.setattr(decoding, "CHECK_INVARIANTS", True)
    monkeypatch.setattr(regional, "LEAST", 1)
    monkeypatch.setenv("ASSISTED_KERNELS", str(tmp_path))


@pytest.fixture
def uncompiled(monkeypatch):
    """The forms that were asked for; their code is not compiled. It counts as faster."""
    asked = []

    def loaded(form, patient):
        asked.append((form, patient))
        code = Code(form)
        return lambda given: [code(*given)]

    monkeypatch.setattr(regional, "loaded", loaded)
    monkeypatch.setattr(regional, "seconds", lambda run: run() and 0.0 if _is_compiled(run) else 1.0)
    return asked


def _is_compiled(trial):
    return any(getattr(cell.cell_contents, "compiled", None) is not None for cell in trial.__closure__)


def wait_for(model):
    """Until what runs in the background is ready."""
    layers = fused.fused(model.target).module.model.layers
    fused.TAKEOVERS[layers][torch.get_num_threads()].thread.join()


def answers(model, ids, **kwargs):
    kwargs = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    output = model.generate(ids, **kwargs)
    assert output.tolist() == model.target.generate(ids, **kwargs).tolist()
    return model.report


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_compiled_layers_say_what_plain_says(name, uncompiled):
    target = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=3)
    for one in (target, model.drafter.model):
        fused.compile_layers(one)
    report = answers(model, random_ids(target, 1, 12))
    if fused.fused(target).module.model.layers[0].form is None:  # windows, for one
        pytest.skip("is not fused here")
    assert report.passes == "compiled layers" and report.accepted > 0 and not report.warnings
    assert {patient for _, patient in uncompiled} == {False}
    assert len(uncompiled) == 2  # one code for all layers of a model


def test_several_rows_run_as_before(uncompiled):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=3)
    answers(model, random_ids(target, 1, 12))
    assert _begun(model)
    wait_for(model)
    ids = random_ids(target, 3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert answers(model, ids, attention_mask=mask).passes == "compiled layers"  # a row that is left alone runs as code
    assert answers(model, ids, attention_mask=mask, eos_token_id=list(range(5, 20))).passes == "compiled layers"


def _begun(model):
    """Whether the next call begins to compile, as if passes had taken long."""
    layers = fused.fused(model.target).module.model.layers
    layers[0].shared.seconds = 1e9
    model.generate(random_ids(model.target, 1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
    return bool(fused.TAKEOVERS.get(layers, {}).get(torch.get_num_threads()).thread)


def test_auto_takes_them_between_calls_once_they_pay(uncompiled):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=3)
    ids = random_ids(target, 1, 12)
    for _ in range(3):
        assert answers(model, ids).passes == "fused layers"
    assert not uncompiled  # these calls were short
    assert _begun(model)
    wait_for(model)
    assert uncompiled[0][1]  # in the background
    assert answers(model, ids).passes == "compiled layers"


def test_a_change_of_the_model_is_followed(uncompiled):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=3)
    ids = random_ids(target, 1, 12)

    def passes():
        earlier = answers(model, ids).passes  # no code of an earlier state
        fused.compile_layers(target)
        return earlier, answers(model, ids).passes

    anew = ("fused layers", "compiled layers")
    assert passes() == anew
    assert answers(model, ids).passes == "compiled layers"
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight.mul_(-1)
    assert passes() == anew
    for layer in target.model.layers:
        layer.self_attn.scaling *= 3
    assert passes() == anew
    hook = target.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    assert passes() == ("eager", "eager")
    hook.remove()
    assert passes()[1] == "compiled layers"


def test_whole_passes_are_compiled_where_a_call_waits(uncompiled):
    target = build(BY_NAME["llama"])
    fused.compile_layers(target)
    assert fused.prepare(target, CallSettings("auto")).runs == "compiled layers"
    assert fused.prepare(target, CallSettings("compile")).runs == "fused layers"  # which are compiled together


def test_a_compiler_that_fails_is_reported(monkeypatch):
    def fails(form, patient):
        raise RuntimeError("the compiler failed: out of luck")

    monkeypatch.setattr(regional, "loaded", fails)
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=3)
    ids = random_ids(target, 1, 12)
    answers(model, ids)
    assert _begun(model)
    wait_for(model)
    report = answers(model, ids)
    assert report.passes == "fused layers" and any("out of luck" in warning for warning in report.warnings)


@pytest.mark.parametrize("wrong", ["output", "slots"])
def test_code_that_is_wrong_is_not_used(wrong, uncompiled, monkeypatch):
    loaded = regional.loaded

    def other(form, patient):
        run = loaded(form, patient)

        def wrongly(given):
            outputs = run(given)
            (outputs[0] if wrong == "output" else given[6]).mul_(1.1)
            return outputs

        return wrongly

    monkeypatch.setattr(regional, "loaded", other)
    target = build(BY_NAME["llama"])
    takeover = regional.Takeover()
    made = fused.fused(target)
    takeover.begin(made.module.model.layers, lambda found: True, False)
    assert takeover.layers is None and takeover.reason


def test_bits_and_switched_off_kernels_never_switch(uncompiled, monkeypatch):
    target = build(BY_NAME["llama"])
    made = fused.prepare(target, CallSettings("auto"))
    made.module.model.layers[0].shared.seconds = 1e9
    assert fused.prepare(target, CallSettings("auto", bits=True)).runs == "fused layers"
    monkeypatch.setenv("ASSISTED_KERNELS", "0")
    fused.prepare(target, CallSettings("auto"))
    assert fused.TAKEOVERS[made.module.model.layers][torch.get_num_threads()].thread is None
    monkeypatch.delenv("ASSISTED_KERNELS")
    fused.prepare(target, CallSettings("auto"))
    assert fused.TAKEOVERS[made.module.model.layers][torch.get_num_threads()].thread is not None


def test_when_compiling_pays(monkeypatch):
    monkeypatch.setattr(regional, "compiler", lambda: "c++")
    monkeypatch.setattr(regional, "is_kept", lambda file: False)
    assert not regional.pays(50, FORM) and regional.pays(150, FORM)
    monkeypatch.setattr(regional, "is_kept", lambda file: True)
    assert not regional.pays(1, FORM) and regional.pays(10, FORM)
    monkeypatch.setattr(regional, "compiler", lambda: None)
    assert not regional.pays(1e9, FORM)


def test_only_columns_that_are_faster_are_taken(uncompiled, monkeypatch):
    layers = fused.fused(build(BY_NAME["llama"])).module.model.layers
    monkeypatch.setattr(regional, "seconds", lambda run: 1.0)
    takeover = regional.Takeover()
    takeover.begin(layers, lambda found: True, False)
    assert takeover.layers is None and "not faster" in takeover.reason

    def seconds(run):
        few = run()[0].shape[1] <= 4
        return float(few != _is_compiled(run))

    monkeypatch.setattr(regional, "seconds", seconds)
    takeover = regional.Takeover()
    takeover.begin(layers, lambda found: True, False)
    assert takeover.layers[0].compiled.columns == {1, 2, 3, 4}


@pytest.mark.parametrize("found", ["nothing", "cut off", "another digest", "not text"])
def test_a_broken_file_is_compiled_anew(found, monkeypatch):
    compiled = []

    def compile_anew(form, file, patient):
        compiled.append(form)
        file.write_bytes(b"code")
        regional.digest_of(file).write_text(hashlib.sha256(b"code").hexdigest())

    monkeypatch.setattr(regional, "compile_to", compile_anew)
    monkeypatch.setattr(regional, "load_compiled", lambda file: file)
    file = regional.file_of(FORM)
    if found != "nothing":
        compile_anew(FORM, file, True)
        compiled.clear()
        regional.loaded(FORM, True)
        assert not compiled
    if found == "cut off":
        file.write_bytes(b"co")
    if found == "another digest":
        regional.digest_of(file).write_text("0")
    if found == "not text":
        regional.digest_of(file).write_bytes(b"\xff\xfe\xff")
    regional.loaded(FORM, True)
    assert compiled == [FORM]


def test_other_threads_and_shapes_have_other_code():
    keys = {Form(*fields[:-1], threads).key for threads in (1, 2) for fields in (list(vars(FORM).values()),)}
    assert len(keys | {FORM.key}) == 2


@needed
@pytest.mark.slow
def test_a_compiler_is_ended_with_its_process():
    """Of a program that ends while it compiles."""
    program = (
        "import threading, time; from assisted.fast import regional; from assisted.fast.regional import Form\n"
        f"threading.Thread(target=regional.loaded, args=({FORM!r}, True), daemon=True).start()\n"
        "while not regional.RUNNING: time.sleep(0.01)\n"
        "print(next(iter(regional.RUNNING)).pid, flush=True)"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    state = Path("/proc", done.stdout.strip(), "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # nobody may have waited for it


@needed
@pytest.mark.slow
@pytest.mark.parametrize("norms", [False, True])
def test_compiled_code_is_the_function(norms):
    form = Form(64, 96, 4, 2, 16, 1e-6, 0.25, norms, (True, False, False, False), 1)
    run = regional.loaded(form, False)
    assert regional.is_kept(regional.file_of(form))
    for width, top, capacity in ((1, 40, 64), (2, 40, 40), (5, 300, 512), (16, 64, 80)):
        given = [t if t.dtype == torch.int64 else torch.rand_like(t) for t in arguments(form, width, top, capacity)]
        given[4] += top - width
        other = [tensor.clone() for tensor in given]
        with torch.inference_mode():
            torch.testing.assert_close(run(list(given))[0], Code(form)(*other), rtol=1e-4, atol=1e-4)
        for one, two in zip(given, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
