"""What a round costs, counted rather than timed: forwards, columns, waits for the device, bytes copied."""

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from pairs import CALL, no_fallback
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from assisted import AssistedModelForCausalLM
from assisted.engine import trust
from assisted.engine.prepared import PreparedModule
from assisted.engine.runner import CachedModel
from assisted.fast import fused
from assisted.lengths import Confidence
from assisted.methods.shared import model_drafter

LENGTH = 4
READS = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "numpy", "nonzero", "equal"}
COPIES = {"cat", "copy_", "clone", "index_put_", "index_put", "index", "gather", "_to_copy", "stack", "index_select"}
LLAMA = next(architecture for architecture in ARCHITECTURES if architecture.name == "llama")


class Waits(TorchFunctionMode):
    """Counts what looks at numbers of a tensor: on a GPU each of these waits until the device is done."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class Copied(TorchDispatchMode):
    """Adds up the bytes of what is copied from one place to another."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in COPIES and isinstance(result, torch.Tensor):
            moved = args[2] if name.startswith("index_put") else result
            self.bytes += moved.numel() * moved.element_size()
        return result


@pytest.fixture
def passes(monkeypatch):
    """(model, rows, columns) of every forward but the prompt's."""
    seen = []
    forward = CachedModel._forward

    def counted(self, ids, kwargs):
        if "logits_to_keep" not in kwargs:
            seen.append((self.model, *ids.shape))
        return forward(self, ids, kwargs)

    monkeypatch.setattr(CachedModel, "_forward", counted)
    for module in (fused, model_drafter):  # on a CPU, fused models look positions up, which reads them
        monkeypatch.setattr(module, "fused", lambda model, trusted, **read: PreparedModule(model))
    monkeypatch.setattr(trust, "active_modes", list)  # the modes here only count
    return seen


def pair(rows, length=12):
    """A model, and a call that is made once to have made what is made once."""
    target = build(LLAMA, max_position_embeddings=2048)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=LENGTH, fast="eager")
    ids = random_ids(target, rows, length, seed=3)

    def call(**kwargs):
        with no_fallback():
            model.generate(ids, **(CALL | {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30} | kwargs))

    call()
    return model, call


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
def test_forwards_and_columns(passes, rows, sampled):
    model, call = pair(rows)
    passes.clear()
    torch.manual_seed(0)
    call(do_sample=sampled)
    draft = [shape for who, *shape in passes if who is model.drafter.model]
    target = [shape for who, *shape in passes if who is not model.drafter.model]
    # a forward of the target a round, over the last token and the draft, of the rows that have not ended
    assert model.report.target_passes == sum(running for running, _ in target)
    assert all(running <= rows and columns <= LENGTH + 1 for running, columns in target)
    # a row gets what is accepted of its draft and a token more, but where it ends; the first token comes with the prompt
    counted = model.report.accepted + model.report.target_passes
    assert counted <= sum(model.report.row_tokens) <= counted + rows
    # the draft reads what was committed, two tokens a row at the least, and then a token at a time but for the last
    assert len(draft) == model.report.drafted if rows == 1 else len(draft) <= LENGTH * len(target)
    assert sum(columns for _, columns in draft) <= (2 + LENGTH - 1 if rows == 1 else 2 * LENGTH) * len(target)


def rounds_and_waits(passes, model, call, **kwargs):
    passes.clear()
    with Waits() as waits:
        call(**kwargs)
    return sum(who is not model.drafter.model for who, *_ in passes), waits.count


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
def test_waits(passes, rows, sampled):
    """A round waits for its verdict, and asks whether the logits of the round before were numbers."""
    model, call = pair(rows)
    looks = 2 + sampled  # a CPU asks whether there is anything to draw from; an accelerator is told with the verdict
    for new in (6, 40):
        torch.manual_seed(new)
        rounds, waits = rounds_and_waits(passes, model, call, do_sample=sampled, max_new_tokens=new)
        assert rounds >= new / (LENGTH + 1) - 1
        assert (
            waits <= looks * rounds + 9
        )  # and what a call does once, such as to ask whether the prompt ends in padding


def test_waits_of_a_policy_that_looks(passes):
    """One more for every token, which it decides on."""
    model, call = pair(1)
    policy = Confidence(0.0, LENGTH)
    rounds, waits = rounds_and_waits(passes, model, call, draft_length=policy, max_new_tokens=40)
    assert waits <= (2 + LENGTH) * rounds + 8


def test_bytes_do_not_grow_with_the_text(passes):
    """Slots are written where they are: nothing that was read before is copied again."""
    each = []
    for length in (100, 500):
        model, call = pair(1, length)
        copied = []
        for new in (4, 30):
            with Copied() as mode:
                call(max_new_tokens=new)
            copied.append(mode.bytes)
        each.append((copied[1] - copied[0]) / 26)
    config = model.target.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # its keys and values
    assert each[1] < 1.2 * each[0]
    # target and draft write some columns that are not kept; the rest is ids, angles and the repeated heads of attention
    assert each[0] < 20 * token
