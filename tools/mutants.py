"""Small defects, planted one at a time in a copy of the tree: which of them do the tests find?

    python -m tools.mutants [--only TEXT] [--tree FOLDER] [--marks EXPRESSION] [--json FILE]

A mutant is a file, a text in it, and what takes the text's place. The tests of that file's part of the package run until
the first one fails. `--tree` takes package and tests from another checkout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MARKS = "not slow and not notebooks and not clients and not documents"
NO_TESTS = "pytest ends with"
SECONDS = 900  # for the tests of one mutant; a mutant that hangs is found, too
COPIED = ("assisted", "tests", "notebooks", "docs", "tools", "benchmarks", "pyproject.toml", "README.md")

TESTS = {
    "core/acceptance.py": "acceptance acceptance_tree",
    "distribution.py": "distribution sampling",
    "lockstep.py": "invalid_logits continued sampling traps",
    "verification.py": "wrong_drafts counts invalid_logits tree_verification continued sampling",
    "decoding.py": "wrong_drafts counts decoding traps",
    "core/drafts.py": "drafts trees wrong_drafts tree_decoding",
    "core/text.py": "text robustness",
    "calls/inputs.py": "generation continued",
    "calls/assembly.py": "generation forwarding robustness continued",
    "engine/cache.py": "cache runtime continued",
    "engine/masks.py": "runtime decoding tree_decoding",
    "engine/runner.py": "runtime prompts decoding continued",
    "engine/passes.py": "prompts",
    "engine/recurrent.py": "recurrent",
    "engine/needs.py": "needs mtp assistant",
    "engine/states.py": "recurrent",
    "engine/hooks.py": "trust",
    "engine/trust.py": "trust",
    "engine/verifiable.py": "trust",
    "engine/session.py": "session",
    "fast/capture.py": "graphs compiled",
    "fast/low_bit.py": "low_bit quantization",
    "fast/products.py": "products fused plan",
    "fast/sources.py": "sources",
    "fast/static_buffers.py": "graphs compiled",
    "methods/shared/chain.py": "wrong_drafts decoding sampling methods",
    "methods/combined.py": "combined fill",
    "methods/eagle/draft.py": "eagle mtp session",
    "methods/early_exit/draft.py": "early_exit",
    "methods/shared/guarded.py": "wrong_drafts robustness",
    "methods/shared/lookup.py": "fill ngram suffix",
    "methods/medusa/draft.py": "medusa",
    "methods/shared/model_drafter.py": "decoding sampling session",
    "methods/ngram.py": "ngram",
    "methods/draft_model/pard.py": "pard",
    "methods/draft_model/train.py": "pard",
    "methods/shared/part.py": "early_exit layer_skip copies",
    "methods/recycle.py": "recycle",
    "methods/suffix/draft.py": "suffix remembered",
    "methods/shared/trees.py": "trees fill medusa merged recycle",
    "lengths/adaptive.py": "controller lengths",
    "lengths/cost_model.py": "cost_model controller",
    "lengths/policies.py": "lengths controller",
    "lengths/rates.py": "rates controller",
    "loading/vocabulary.py": "vocabulary other_tokenizer translation",
    "methods/medusa/head.py": "medusa_heads medusa",
    "loading/quantization.py": "quantization low_bit",
    "methods/eagle/head.py": "eagle_head eagle_formats eagle",
    "methods/shared/runner.py": "peagle eagle",
    "methods/eagle/train.py": "peagle training",
    "methods/shared/heads.py": "eagle_head mtp eagle",
    "methods/eagle/formats.py": "eagle_formats published_heads",
    "methods/shared/files.py": "medusa_heads published_heads",
    "methods/mtp/formats.py": "mtp_formats",
    "methods/mtp/head.py": "mtp mtp_layers",
    "methods/dflash/head.py": "block",
    "methods/dflash/draft.py": "block",
    "methods/dflash/formats.py": "block_formats",
    "methods/dflash/train.py": "block",
    "methods/mtp/draft.py": "mtp",
    "methods/assistant/head.py": "assistant",
    "methods/assistant/draft.py": "assistant",
    "methods/candidate_generator.py": "candidate_generator",
}
"""Test files of each part, the fastest first."""

MUTANTS = [
    ("core/acceptance.py", "if token != choice[i]), len(tokens))", "if token != choice[i]), 0)"),
    ("core/acceptance.py", "if parent == here and token == choice[here + 1]:", "if token == choice[here + 1]:"),
    ("core/acceptance.py", "(weight.unsqueeze(-1) * p - q).clamp(min=0)", "(weight.unsqueeze(-1) * p - q).abs()"),
    ("core/acceptance.py", "_drafted(lengths - 1, n)[:, :-1]", "_drafted(lengths, n)[:, :-1]"),
    ("core/acceptance.py", "(order < order.unsqueeze(1))", "(order <= order.unsqueeze(1))"),
    ("core/acceptance.py", "whole = (accepted == lengths).unsqueeze(-1)", "whole = (accepted == n).unsqueeze(-1)"),
    ("core/acceptance.py", "accepted = last_success(h, ", "accepted = first_failure(h, "),
    ("core/acceptance.py", "target, draft, _at(weights, accepted)", "target, draft, torch.ones_like(draft[:, 0])"),
    ("core/acceptance.py", "return torch.where(total > 0, rest / total, 0)", "return rest"),
    ("core/acceptance.py", "rest = q.where(taken == 0, 0)", "rest = q"),
    ("core/acceptance.py", "rest = residual(left, distribution,", "rest = residual(p[:, 0], distribution,"),
    ("core/acceptance.py", "p[:, i + 1].where(kept[:, i : i + 1], rest)", "p[:, i + 1].where(kept[:, i : i + 1], left)"),
    ("engine/needs.py", "find_final_norm(model, layers) if last in wanted else ()", "()"),
    ("methods/mtp/head.py", "mask = without_first(attention_mask, before + len(made))", "mask = attention_mask"),
    ("methods/mtp/head.py", "self.layers[before:], read, strict=True)", "self.layers[before:][::-1], read, strict=True)"),
    ("distribution.py", "kept = before < processor.top_p", "kept = before + p < processor.top_p"),
    ("distribution.py", "if min(lengths) >= enough:", "if max(lengths) >= enough:"),
    ("distribution.py", "groups[len(prefix)].append((row, node))", "groups[0].append((row, node))"),
    ("distribution.py", "not all(map(self._is_known, self.processors))", "not any(map(self._is_known, self.processors))"),
    ("verification.py", "columns = [0, *(node + 1 for node in walk)]", "columns = [0, *(node for node in walk)]"),
    ("verification.py", "if len(new[row]) < len(path[row]):", "if len(new[row]) < len(path[row]) and row:"),
    ("lockstep.py", "or text.padded_rows != before:", "or False:"),
    ("lockstep.py", "child = child.masked_fill(padded, step + 1)", "child = child.masked_fill(padded, step)"),
    ("decoding.py", "text.room - 1, room - 1)", "room - 1)"),
    ("methods/shared/guarded.py", "self.drafting = None", "pass"),
    ("core/drafts.py", "(self.tokens < vocabulary)", "(self.tokens <= vocabulary)"),
    ("core/drafts.py", "jump = jump.gather(1, jump)", "jump = jump"),
    ("core/text.py", "columns >= torch.tensor(self.lengths", "columns > torch.tensor(self.lengths"),
    ("core/text.py", "new[: self.max_length - length]", "new[: self.max_length]"),
    ("core/text.py", "count = len(new) if stop is None else stop", "count = len(new)"),
    ("calls/inputs.py", "bool(self.config.return_dict_in_generate) or", "False or"),
    ("engine/cache.py", "self.keys[:, :, length - held : length] = layer.keys", "self.keys[:, :, :held] = layer.keys"),
    ("engine/cache.py", "            if to != column\n", "            if to > column\n"),
    ("engine/cache.py", "visible.gather(1, source) & (moved_from >= 0)", "visible.gather(1, source)"),
    ("engine/cache.py", "self.top = max(lengths) + width", "self.top = min(lengths) + width"),
    ("engine/cache.py", "return [n - p + q for n, p, q in", "return [n - p for n, p, q in"),
    ("engine/masks.py", "places > where[:, :, None] - window", "places >= where[:, :, None] - window"),
    ("engine/masks.py", "seen[:, :, 0] = True", "seen[:, 1:, 0] = True"),
    ("engine/masks.py", "seen[:, :, :hidden] &= visible[:, None, :hidden]", "pass"),
    ("engine/runner.py", "(mask.long().cumsum(1) - 1)", "mask.long().cumsum(1)"),
    ("engine/passes.py", "part = read(rows, first)", "part = read(rows, 0)"),
    ("engine/recurrent.py", ": 0 if kept == self.ids.shape[1] else kept]", ":kept]"),
    ("engine/states.py", "saved.copy_(state)", "pass"),
    ("engine/recurrent.py", "return logits[:, unread:]", "return logits[:, : ids.shape[1]]"),
    ("engine/trust.py", "forward.append(f\"{name_of(model, module)} is traced or scripted\")", "pass"),
    ("engine/trust.py", "elif callable(value):", "elif False:"),
    ("engine/trust.py", "_is_of_another(one, [source])", "False"),
    ("engine/trust.py", "all([names.get(name) is value for", "all([True for"),
    ("engine/trust.py", "if any(record.alters for record in of_hook):", "if False:"),
    ("engine/trust.py", "if hides and isinstance(bound, nn.Module)", "if False and isinstance(bound, nn.Module)"),
    ("engine/trust.py", "if not is_own:  # which", "if False:  # which"),
    ("engine/hooks.py", "if is_local and (step.opname ==", "if False and (step.opname =="),
    ("engine/verifiable.py", "if kept else reason", "if False else reason"),
    ("engine/verifiable.py", "all(one.is_current() for one in records)", "True"),
    ("engine/session.py", "min(self._length, shared - 1, width - 1)", "min(self._length, width - 1)"),
    ("engine/session.py", "slots.rewind([self._length] * slots.rows)", "pass"),
    ("fast/capture.py", "self.held.popitem(last=False)", "self.held.popitem(last=True)"),
    ("fast/low_bit.py", "-inputs % _INPUTS[bits], 0, -outputs % _OUTPUTS[bits]", "0, 0, -outputs % _OUTPUTS[bits]"),
    ("fast/products.py", "return made[:columns].view(", "return made[-columns:].view("),
    ("fast/products.py", "if biases:\n", "if len(biases) > 1:\n"),
    ("fast/sources.py", "numbers[0] = 2 * numbers[0] + 1", "numbers[:] = 1"),
    ("methods/shared/chain.py", "append(self.entries.q(q))", "append(self.entries.q(q).roll(1, -1))"),
    ("engine/cache.py", "self.rewind(known)", "pass"),
    ("methods/combined.py", "return promised >= min(CERTAIN, SURE * member.budget)", "return True"),
    ("methods/eagle/draft.py", "known = min(held[0], past)", "known = past"),
    ("methods/eagle/draft.py", "features.gather(1, kept.expand(-1, -1, features.shape[-1]))", "features"),
    ("methods/early_exit/draft.py", "min(accepted[row] + 1, round.drafted[row])", "round.drafted[row]"),
    ("methods/medusa/draft.py", "[columns[index] for columns, index in zip(path, last, strict=True)]", "last"),
    ("methods/shared/trees.py", "if child not in self.known or draft.q is not None:", "if child not in self.known:"),
    ("methods/shared/model_drafter.py", "base + min(count, read)", "base + count"),
    ("methods/shared/chain.py", "value=float(\"-inf\"))", "value=0.0)"),
    ("methods/shared/lookup.py", "1 << max(0, self.misses - 2)", "1 << max(0, self.misses)"),
    ("methods/shared/trees.py", ".where(is_drafted[:, :, None], certain)", ".where(is_drafted[:, :, None], certain * 0)"),
    ("methods/draft_model/pard.py", "cache.commit(unread)", "cache.commit([read + count - 1 for read in unread])"),
    ("methods/draft_model/pard.py", "> first, self.drafter.mask", ">= first, self.drafter.mask"),
    ("methods/shared/runner.py", ">= ends", "> ends"),
    ("methods/shared/runner.py", "self.head.fuse(self.head.mask_hidden)", "self.head.fuse(self.head.mask_hidden * 0)"),
    ("methods/draft_model/train.py", "depths), anchors + depths)", "depths), anchors)"),
    ("methods/eagle/train.py", "there = anchors + depths + 1", "there = anchors + depths"),
    ("methods/combined.py", "observe(of_continued(round) if number == chosen else round)", "observe(round)"),
    ("methods/recycle.py", "successors.pop(successor, None)", "pass"),
    ("methods/suffix/draft.py", "points, new = [], text[-tree.depth :]", "points, new = [], text[-1:]"),
    ("methods/shared/trees.py", "offer(depth, index + 1, parent, above)", "offer(depth, index + 1, parent, 1.0)"),
    ("lengths/cost_model.py", "acceptance ** (length + 1)", "acceptance**length"),
    ("lengths/adaptive.py", "rejected = accepted < depth and round.kept[row] > accepted", "rejected = accepted < depth"),
    ("lengths/policies.py", "q.amax(-1) >= self.policy.threshold", "q.amax(-1) < self.policy.threshold"),
    ("lengths/rates.py", "right[cell] += was_right", "right[cell] += 1"),
    ("loading/vocabulary.py", " and _learned(target_tokenizer) == _learned(draft_tokenizer)", ""),
    ("methods/eagle/head.py", "residual = normed if self.norm_before_residual else states", "residual = states"),
    ("methods/eagle/head.py", "[self.input_layernorm(embeddings), normed]", "[normed, self.input_layernorm(embeddings)]"),
    ("methods/shared/heads.py", "own, buffer.to(self.get_buffer(name).device))", "own, self.get_buffer(name))"),
    ("methods/mtp/head.py", "self.embed_norm(embeddings), self.hidden_norm(states)", "embeddings, self.hidden_norm(states)"),
    ("methods/mtp/head.py", "            part.layer_idx = place", "            pass"),
    ("methods/mtp/head.py", "            if before == 0 and made:", "            if made:"),
    ("methods/mtp/head.py", "states[:, 0, self.config.hidden_size :] = last", "pass"),
    ("methods/dflash/head.py", "F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block]", "blocks.roll(tap, -2)"),
    ("methods/dflash/head.py", "(ahead > -(config.sliding_window or 0))", "(ahead >= -(config.sliding_window or 0))"),
    ("methods/dflash/head.py", "if config.causal if kind == FULL else config.sliding_causal:", "if config.causal:"),
    ("methods/dflash/draft.py", "cache.commit(list(counts))", "cache.commit([states.shape[1]] * len(counts))"),
    ("methods/dflash/draft.py", "states[cache.order]", "states"),
    ("methods/dflash/draft.py", "(slots < known + ids.shape[1])", "(slots <= known + ids.shape[1])"),
    ("methods/dflash/formats.py", "(tap + 1 for tap in ids)", "ids"),
    ("methods/shared/heads.py", "tap + (tap == layers and not normed)", "tap"),
    ("methods/eagle/head.py", "<= window)", "< window)"),
    ("methods/eagle/formats.py", "tap + 1 if counts_layers else tap", "tap"),
    ("methods/eagle/formats.py", "given.get(field, has_bias)", "given.get(field)"),
    ("methods/shared/files.py", "tokens = tokens + offsets", "tokens = offsets"),
    ("methods/shared/files.py", "found = (re.sub(f\"^(?:{ours})\", theirs, name) for", "found = (name for"),
    ("methods/shared/files.py", "torch.cat(rows, -2 if rows[0].dim() > 1 else 0)", "torch.cat(rows[::-1], 0)"),
    ("methods/mtp/formats.py", "numbers - int(", "numbers - 0 * int("),
    ("methods/mtp/formats.py", "numbers.mT if name", "numbers if name"),
    ("methods/dflash/train.py", "before = text[:, None] < ", "before = text[:, None] <= "),
    ("methods/dflash/draft.py", "torch.cat(sure, 1).cumprod(1)", "torch.cat(sure, 1)"),
    ("methods/eagle/draft.py", "if not round.draft.is_that_of(self.proposed):", "if True:"),
    ("methods/assistant/draft.py", "seen = (slots >= first) & (slots < end)", "seen = slots >= first"),
    ("methods/assistant/draft.py", "length - back - window + 1) for", "length - back - window) for"),
    ("methods/assistant/draft.py", "seen[:, : hidden.shape[1]] &= hidden", "pass"),
    ("methods/assistant/draft.py", "(above + 1)[:, :, None]", "above.clamp(min=0)[:, :, None]"),
    ("methods/assistant/draft.py", "states[torch.arange(len(last), device=states.device), last]", "states[:, 0]"),
    ("methods/assistant/head.py", "config.num_hidden_layers - (getattr(", "config.num_hidden_layers - 0 * (getattr("),
    ("methods/assistant/head.py", "inner)) * self.layer_scalar", "inner))"),
    ("methods/assistant/head.py", "topk(self.chosen)", "topk(self.count)"),
    ("methods/candidate_generator.py", "[:, None]) > 0).all()", "[:, None]) >= 0).all()"),
    ("methods/candidate_generator.py", "if not torch.equal(given[:, :count], ids):", "if False:"),
    ("methods/candidate_generator.py", "get_candidates(ids.clone())", "get_candidates(ids)"),
    ("methods/medusa/head.py", "x = x + F.silu(", "x = F.silu("),
    ("fast/static_buffers.py", "store[:, :, held:] = 0", "pass"),
    ("calls/assembly.py", "target.run_only(list(range(text.rows)))", "pass"),
]  # fmt: skip


@dataclass
class Found:
    """What became of a mutant. by: the first test that failed, "hangs", or None where none did."""

    file: str
    old: str
    new: str
    by: str | None = None
    seconds: float = 0.0


class FirstFailure:
    """A plugin of pytest that tells of the first test, or file, that fails."""

    def __init__(self, told: Any):
        self.told = told

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.told.put(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.told.put(report.nodeid)


def check(tree: Path, mutants: list[tuple[str, str, str]]) -> None:
    """Raise ValueError for a mutant whose text is not in its file exactly once, or whose file has no tests."""
    for file, old, _ in mutants:
        count = (tree / "assisted" / file).read_text(encoding="utf-8").count(old)
        if count != 1 or file not in TESTS:
            raise ValueError(f"{file}: {old!r} is there {count} times; change the mutant in {Path(__file__).name}")


def run(tree: Path, files: list[str], marks: str, told: Any) -> None:
    """Run tests in a process that has imported torch, but nothing of the package."""
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path) != ROOT)]
    sys.dont_write_bytecode = True  # a mutant may be as old and as long as the one before
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", marks, *(f"tests/test_{file}.py" for file in files)]
    code = pytest.main(arguments, plugins=[FirstFailure(told)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        told.put(f"{NO_TESTS} {code!r}")


def tried(tree: Path, mutant: tuple[str, str, str], marks: str) -> Found:
    file, old, new = mutant
    path, found, started = tree / "assisted" / file, Found(*mutant), time.perf_counter()
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=run, args=(tree, TESTS[file].split(), marks, told))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        found.by = "hangs"
    elif not told.empty():
        found.by = told.get()
    elif process.exitcode:
        found.by = f"exit status {process.exitcode}"
    path.write_text(text, encoding="utf-8")
    found.seconds = round(time.perf_counter() - started, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this in their file or their texts")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to mutate and to test (default: this one)"
    )
    parser.add_argument("--marks", default=MARKS, help="which tests, as pytest's -m (default: those of `make test`)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep the results here, and go on after those that are here"
    )
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if options.only in " ".join(one)]
    check(options.tree, chosen)
    import hypothesis  # noqa: F401 - the processes of the mutants need not import these again
    import transformers.models.llama.modeling_llama  # noqa: F401

    results = []
    if options.json and options.json.exists():
        results = [Found(**one) for one in json.loads(options.json.read_text(encoding="utf-8"))]
    done = {(one.file, one.old, one.new) for one in results}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in filter(lambda name: (options.tree / name).exists(), COPIED):
            source, to = options.tree / name, tree / name
            shutil.copytree(
                source, to, ignore=shutil.ignore_patterns("__pycache__")
            ) if source.is_dir() else shutil.copy(source, to)
        for mutant in (one for one in chosen if one not in done):
            found = tried(tree, mutant, options.marks)
            if found.by is not None and found.by.startswith(NO_TESTS):
                raise RuntimeError(f"{found.file}: {found.by}")
            results.append(found)
            print(
                f"{found.by or 'MISSED'} ({found.seconds} s): {found.file}: {found.old!r} -> {found.new!r}", flush=True
            )
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    missed = sum(found.by is None for found in results)
    print(f"{len(results) - missed} of {len(results)} mutants found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
