"""`assisted chat`: a conversation at the terminal, its commands, and the line that reports on each answer.

Knows lines and commands. `assisted.chat` has the conversation, `terminal` shows the text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .arguments import add_generation, load, option, print_json, sampling
from .terminal import Loading, Wrapped, note, streamer

_QUOTES = '"""'
_SETTINGS = {"temperature": float, "top_p": float, "top_k": int, "seed": int, "max_new_tokens": int}
_HELP = f"""\
/system TEXT    replace the system message (alone: show it)
/set NAME VALUE change {", ".join(_SETTINGS)} (alone: show them)
/more           go on with an answer that was cut
/save FILE      write the messages as JSON; /load FILE reads them
/clear, /reset  start a new conversation
/quit, Ctrl-D   end
Ctrl-C stops the answer. Several lines are one message between {_QUOTES} and {_QUOTES}, or after a backslash at a line's end."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `chat` into the parser. command: makes a parser with a function to run and a text."""
    chat = command("chat", _chat, "talk to a pair, with streamed answers")
    option(chat, "--system", "system message of the conversation")
    option(chat, "--show-drafts", "color the tokens that were drafted and accepted", False)
    add_generation(chat, "suffix+zoo:smollm2-eagle3 for zoo:smollm2, else suffix")
    chat.set_defaults(target="zoo:smollm2")


def _chat(args: argparse.Namespace) -> None:
    model = load(args, "zoo:smollm2", "suffix+zoo:smollm2-eagle3")
    at_terminal = _Chat(model, args)
    if sys.stdin.isatty():
        note(f"{args.target}, drafted by {args.draft or model.spec.name}. /help lists the commands.")
        with Loading(), warnings.catch_warnings(record=True) as caught:
            at_terminal.conversation.prepare(**at_terminal.sampling)
        for told in dict.fromkeys(str(one.message) for one in caught):
            note(told)
    for message in _messages():
        if message == "/quit":
            break
        at_terminal.take(message)


class _Chat:
    """A conversation and its settings, which the commands change. Each command is a method, and takes the rest of its line."""

    def __init__(self, model: Any, args: argparse.Namespace):
        from ..chat import ContextFull, Conversation
        from ..fast.sources import keep_steady

        keep_steady([model.target, *model.drafter.modules])  # nobody else has them
        self.model, self.args, self.full = model, args, ContextFull
        self.conversation = Conversation(model, args.system)
        self.sampling = sampling(args)

    def take(self, message: str) -> None:
        """Answer a message, or do what a command says. Errors that the user can mend are shown."""
        name, _, rest = message.partition(" ")
        found = re.fullmatch(r"/(\w+)", name) if "\n" not in message else None
        run = getattr(self, f"do_{found[1]}", None) if found else None
        if found and run is None and not rest:
            note(f"{message} is no command.\n{_HELP}")
            return
        try:
            if run is not None:
                run(rest.strip())
            else:
                self._answer(message, lambda **call: self.conversation.say(message, **call))
        except (ValueError, OSError) as error:  # the conversation before this message still stands
            if run is None and not isinstance(error, self.full):
                raise
            if self.args.json:
                print_json({"message": message, "error": str(error)}, indent=None)
            print(f"assisted: error: {error}", file=sys.stderr)

    def do_help(self, _: str) -> None:
        note(_HELP)

    def do_reset(self, _: str) -> None:
        self.conversation.reset()

    do_clear = do_reset

    def do_system(self, text: str) -> None:
        if text:
            self.conversation.system = text
            rest = [one for one in self.conversation.messages if one["role"] != "system"]
            self.conversation.restore([{"role": "system", "content": text}, *rest])
        else:
            note(self.conversation.system or "There is no system message.")

    def do_set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            note(", ".join(f"{name} {getattr(self.args, name)}" for name in _SETTINGS))
            return
        if name not in _SETTINGS:
            raise ValueError(f"/set: {name} is no setting; there are {', '.join(_SETTINGS)}")
        unset = value.strip() == "none" and name not in ("temperature", "max_new_tokens")
        try:
            read: Any = None if unset else _SETTINGS[name](value)
        except ValueError as error:
            raise ValueError(f"/set: {name} is a number, and {value.strip() or 'nothing'} was given") from error
        if name == "max_new_tokens" and read < 1:
            raise ValueError(f"/set: max_new_tokens is at least 1, and {read} was given")
        changed = argparse.Namespace(**vars(self.args) | {name: read})
        again = vars(changed) if name == "seed" else vars(changed) | {"seed": None}  # drawn numbers go on otherwise
        self.sampling, self.args = sampling(argparse.Namespace(**again)), changed

    def do_save(self, file: str) -> None:
        if not file:
            raise ValueError("/save: give the name of a file")
        Path(file).write_text(json.dumps(self.conversation.messages, indent=1) + "\n", encoding="utf-8")
        note(f"[{len(self.conversation.messages)} messages are in {file} now.]")

    def do_load(self, file: str) -> None:
        if not file:
            raise ValueError("/load: give the name of a file that /save has written")
        try:
            self.conversation.restore(json.loads(Path(file).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"/load: {file} has no saved conversation ({error})") from error
        note(f"[The conversation has the {len(self.conversation.messages)} messages of {file}.]")

    def do_more(self, _: str) -> None:
        self._answer("/more", self.conversation.more)

    def _answer(self, message: str, ask: Callable[..., Any]) -> None:
        args, model = self.args, self.model
        after = self.conversation.ids[-1:] if message == "/more" else []
        shown = None if args.json else streamer(model, args.show_drafts, after)
        model.watch = getattr(shown, "see", None)
        try:
            with _wrapped(), _stopped_by_ctrl_c() as stop:
                reply = ask(
                    max_new_tokens=args.max_new_tokens, streamer=shown, stopping_criteria=[stop], **self.sampling
                )
        finally:
            model.watch = None
        report: Any = model.report
        if args.json:
            turn = {"message": message, "reply": reply.text, "cut": reply.cut, "prompt_tokens": reply.prompt_tokens}
            print_json({**turn, "cached_tokens": reply.cached_tokens, "report": report.to_dict()}, indent=None)
            return
        if reply.cut:
            why = "stopped" if stop.asked else f"cut after {report.new_tokens} tokens"
            note(f"[The answer was {why}; /more goes on.]")
        if not args.quiet:
            note(f"[{_brought(model)}, {reply.cached_tokens} of {reply.prompt_tokens} prompt tokens cached]")


def _wrapped() -> Any:
    return contextlib.redirect_stdout(Wrapped(sys.stdout)) if sys.stdout.isatty() else contextlib.nullcontext()  # type: ignore[type-var]


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[Any]:
    """A stopping criterion for Ctrl-C: the answer ends after a token, and is kept. A second Ctrl-C interrupts it."""
    import torch
    from transformers import StoppingCriteria

    class Stop(StoppingCriteria):
        asked = False

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), self.asked, device=input_ids.device)

    stop = Stop()

    def ask(*_: Any) -> None:
        stop.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _messages() -> Iterator[str]:
    """The messages on standard input, without empty ones: lines, or several lines between quotes or after backslashes."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history)
    lines: list[str] = []
    quoted = False
    while True:
        try:
            line = input(("... " if lines or quoted else "> ") if sys.stdin.isatty() else "")
        except EOFError:
            line = None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            note("\nCtrl-D ends the program.")
            lines, quoted = [], False
            continue
        if line is not None:
            text = line.rstrip()
            if not quoted and not lines and text.lstrip().startswith(_QUOTES):
                quoted, text = True, text.lstrip()[len(_QUOTES) :]
            ends = quoted and text.endswith(_QUOTES)
            goes_on = not ends if quoted else text.endswith("\\")
            lines.append(text[: -len(_QUOTES)] if ends else text[:-1] if goes_on and not quoted else text)
            if goes_on:
                continue
        message = "\n".join(lines).strip()
        lines, quoted = [], False
        if message:
            yield message
        if line is None:
            return


def _brought(model: Any) -> str:
    """What drafting brought in the last call: its prompt and rounds, against the same prompt and, for every token, the
    measured time of a forward pass without a draft."""
    report = model.report
    found = f"{report.new_tokens} tokens in {report.seconds:.2f} s, {report.tokens_per_pass:.2f} per forward pass"
    if report.drafted:
        found += f", {report.accepted} of {report.drafted} drafted tokens accepted"
    costs = None if model.length is None else model.length.costs
    took = report.draft_seconds + report.verify_seconds
    alone = report.plain_seconds_per_token or (None if costs is None else costs.verify_seconds(1))
    if alone is None or not report.target_passes or not took:
        return found
    decoded = report.tokens_per_pass * report.target_passes
    without = report.prompt_seconds + decoded * alone
    return f"{found}, {without / took:.2f} times as fast as without drafts ({alone * 1e3:.1f} ms per token)"
