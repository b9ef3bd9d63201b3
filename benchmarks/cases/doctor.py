"""The output of `assisted doctor` for the shipped pair, for its page."""

import shlex
from contextlib import redirect_stdout
from io import StringIO

from shared import Section

OPTIONS = {"command": ("zoo:target --draft zoo:draft --draft suffix --threads 1", "what follows `assisted doctor`")}
SECTIONS = (Section("howto/doctor"),)


def measure(args):
    from assisted.cli.main import main

    with redirect_stdout(StringIO()) as printed:
        main(["doctor", *shlex.split(args.command)])
    return {"command": args.command, "printed": printed.getvalue()}


def markdown(found):
    return f"`assisted doctor {found['command']}`:\n\n```text\n{found['printed']}```"
