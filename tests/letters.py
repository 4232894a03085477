"""A detokeniser for tests: token 10 + i is letter i, and text that may begin a stop string is held back."""

from __future__ import annotations

__all__ = ["Letters"]


class Letters:
    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = stops
        self.stopped: str | None = None
        self.held = ""

    def push(self, token: int) -> str:
        self.held += chr(ord("a") + token - 10) if token >= 10 else ""
        found = [(self.held.index(stop), stop) for stop in self.stops if stop in self.held]
        if found:
            at, self.stopped = min(found)
            text, self.held = self.held[:at], ""
            return text
        keep = max(
            (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])),
            default=0,
        )
        cut = len(self.held) - keep
        text, self.held = self.held[:cut], self.held[cut:]
        return text

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text

    def mark(self) -> object:
        return self.stopped, self.held

    def restore(self, mark: object) -> None:
        self.stopped, self.held = mark  # type: ignore[misc]
