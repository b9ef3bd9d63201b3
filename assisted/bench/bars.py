"""Progress bars for measuring at a terminal. Knows tqdm alone."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

__all__ = ["Bars"]

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


class Bars:
    """A bar on standard error for one thing after the other: `bars("measuring", 0.5)`. Close it, or use it in a `with`."""

    def __init__(self) -> None:
        self.what = ""
        self.bar: Any = None

    def __call__(self, what: str, share: float) -> None:
        if what != self.what:
            self.close()
            self.what, self.bar = what, tqdm(total=1.0, desc=what, leave=False, bar_format=_FORMAT)
        self.bar.update(share - self.bar.n)

    def close(self) -> None:
        """End the bar that is shown."""
        if self.bar is not None:
            self.bar.close()
        self.what, self.bar = "", None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()
