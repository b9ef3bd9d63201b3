"""Write the output of `assisted doctor` for the shipped pair into its page. Other arguments are those of the command.

python benchmarks/doctor.py --docs docs/howto/doctor.md
"""

from __future__ import annotations

import shlex
from contextlib import redirect_stdout
from io import StringIO

from tables import arguments, publish

from assisted.cli.main import main as command

TYPED = "zoo:target --draft zoo:draft --draft suffix --threads 1"


def main() -> None:
    args, typed = arguments(__doc__, ("--docs",)).parse_known_args()
    typed = typed or shlex.split(TYPED)
    with redirect_stdout(StringIO()) as printed:
        command(["doctor", *typed])
    publish(f"`assisted doctor {shlex.join(typed)}`:\n\n```text\n{printed.getvalue()}```", args.docs)


if __name__ == "__main__":
    main()
