"""Past outputs of earlier processes: found, bounded, private, and never a reason for another text."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from architectures import build, random_ids
from pairs import BY_NAME, CALL, pair, tokenizer
from safetensors.torch import load_file, save_file

from assisted import AssistedModelForCausalLM, Suffix
from assisted.methods.suffix.memory import Memory, OtherTokenizer, cut
from assisted.methods.suffix.tree import END

LONG = CALL | {"max_new_tokens": 40}


def remembering(path: Any, **kwargs: Any) -> AssistedModelForCausalLM:
    spec = Suffix(memory_file=path)
    return AssistedModelForCausalLM.from_models(pair()[0], spec, tokenizer=tokenizer(), draft_length=8, **kwargs)


def memory(path: Path, size: int = 96, limit: int = 1000, **kwargs: Any) -> Memory:
    return Memory(path, tokenizer(**kwargs), size, limit)


def accepted(model: AssistedModelForCausalLM) -> int:
    assert model.report is not None
    return model.report.accepted


def test_the_next_model_drafts_what_the_last_one_wrote(tmp_path: Path) -> None:
    ids, path = random_ids(pair()[0], 1, 12, seed=5), tmp_path / "folder" / "memory"
    expected = pair()[0].generate(ids, **LONG).tolist()
    found = []
    for _ in range(2):
        model = remembering(path)
        assert model.generate(ids, **LONG).tolist() == expected
        found.append(accepted(model))
    assert found[0] < 5 and found[1] > 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["memory"]
    assert memory(path).read() == [*expected[0][12:], END] * 2  # outputs, not prompts


def test_several_writers_leave_a_whole_file(tmp_path: Path) -> None:
    """Threads of one process lose nothing; processes may lose texts, but the file stays readable."""
    path = tmp_path / "memory"
    threads = [threading.Thread(target=memory(path).add, args=([[number] * 5],)) for number in range(3, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(memory(path).read()) == sorted([END] * 17 + [n for n in range(3, 20) for _ in range(5)])
    code = """
        import sys
        from pathlib import Path
        from test_suffix_memory import memory
        for number in range(40):
            memory(Path(sys.argv[1])).add([[int(sys.argv[2])] * 50])
    """
    runs = [fresh.begun(code, path, number) for number in (30, 40)]
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    found = memory(path).read()
    texts = "".join(map(chr, (token + 1 for token in found))).split(chr(0))
    assert {len(text) for text in texts if text and ord(text[0]) > 30} == {50}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "cut off":
        path.write_bytes(data[:-7])
    elif kind == "a changed token":
        path.write_bytes(data[:-4] + b"\x07\x00\x00\x00")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not tokens")
    elif kind == "too large":
        path.write_bytes(data + bytes(1 << 20))
    elif kind == "other tensors":
        save_file({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("kind", ["cut off", "a changed token", "empty", "text", "too large", "other tensors"])
def test_a_damaged_file_is_one_warning(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    ids = random_ids(pair()[0], 1, 12, seed=5)
    expected = remembering(path).generate(ids, **LONG).tolist()
    damage(path, kind)
    with pytest.warns(UserWarning, match="memory_file: .* cannot be read") as caught:
        model = remembering(path)
        assert model.generate(ids, **LONG).tolist() == expected
    assert len([one for one in caught if "memory_file" in str(one.message)]) == 1
    assert accepted(model) < 5
    assert memory(path).read() == [*expected[0][12:], END]  # written anew


def test_tokens_that_the_target_does_not_have(tmp_path: Path) -> None:
    memory(tmp_path / "memory").add([[3, 95]])
    with pytest.warns(UserWarning, match="tokens that the target does not have"):
        assert memory(tmp_path / "memory", size=95).read() == []


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    memory(path).add([[3, 4, 5]])
    other = memory(path, first="A")
    with pytest.raises(OtherTokenizer, match=r"memory_file: .* another tokenizer; name another file"):
        other.read()
    target = build(BY_NAME["llama"])
    with pytest.raises(ValueError, match="another tokenizer"):
        AssistedModelForCausalLM.from_models(target, Suffix(memory_file=path), tokenizer=tokenizer(first="A"))
    with pytest.warns(UserWarning, match="cannot be written"):  # it came while a model was running
        other.add([[6]])
    assert memory(path).read() == [3, 4, 5, END]


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"memory_file: .* is not a file"):
        remembering(tmp_path)
    with pytest.raises(ValueError, match="memory_file: 5 is not a path"):
        Suffix(memory_file=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_file: only the target's tokenizer"):
        AssistedModelForCausalLM.from_models(pair()[0], Suffix(memory_file=tmp_path / "memory"))


def test_a_file_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = remembering(tmp_path / "file" / "memory")
    ids = random_ids(pair()[0], 1, 12, seed=5)
    with pytest.warns(UserWarning, match="memory_file: .* cannot be written") as caught:
        outputs = [model.generate(ids, **LONG).tolist() for _ in range(2)]
    assert outputs[0] == outputs[1] == pair()[0].generate(ids, **LONG).tolist()
    assert len([one for one in caught if "memory_file" in str(one.message)]) == 1
    assert accepted(model) > 20  # this process remembers


def test_the_limit(tmp_path: Path) -> None:
    kept = memory(tmp_path / "memory", limit=10)
    for number in range(3, 9):
        kept.add([[number] * 3])
    assert kept.read() == [7, 7, 7, END, 8, 8, 8, END]
    kept.add([list(range(3, 33))])  # longer than all
    assert kept.read() == [*range(24, 33), END]
    assert len(load_file(tmp_path / "memory")["tokens"]) == 10
    assert cut([1, END, 2, END], 2) == [2, END]
    assert cut([1, 2, END, 3, END], 4) == [3, END]


def test_a_pair_does_not_take_it_along(tmp_path: Path) -> None:
    model = remembering(tmp_path / "memory")
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    assert again.spec == Suffix()
    assert str(tmp_path / "memory") not in (tmp_path / "pair" / "config.json").read_text()
