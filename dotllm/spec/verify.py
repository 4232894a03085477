"""From a block of logits to the tokens that come out of it, exactly as if they had been drawn one at a time.

Row 0 belongs to the last token of the history, row i to draft i:

    history  ... t          drafts  d1  d2  d3
    logits       row 0              row 1  row 2  row 3
    drawn        s1 == d1 ->        s2 == d2 ->  s3 != d3: s3 is the block's last token, row 3 never happened

Each row is drawn by the request's own cursor - sampler, penalties over the history so far, detokeniser, stop rules -
so plain decoding is the case without drafts, and nothing can tell afterwards where the blocks lay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import StateError
from dotllm.sampling.chain import SamplerChain
from dotllm.sampling.params import SamplingParams

__all__ = ["Cursor", "Emitted", "FinishReason", "TextSink", "Verdict", "verify"]

FinishReason = Literal["stop", "length"]


class TextSink(Protocol):
    """Turns tokens into text that is safe to show, and watches for stop strings; see `text.stream`."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; with a stop string found, what comes before it."""

    def finish(self) -> str:
        """What was still held back."""

    def mark(self) -> Any: ...
    def restore(self, mark: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token of the answer. `text` is what it made certain, often that of earlier tokens, often nothing."""

    token: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a block gave: as many rows become real as tokens were drawn, for the last token has no row yet."""

    tokens: tuple[Emitted, ...]
    finish: FinishReason | None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def accepted(self) -> int:
        """Drafts that saved a step."""
        return max(0, len(self.tokens) - 1)


class _Mark(NamedTuple):
    tokens: int
    finish: FinishReason | None
    text: Any


class _Saved(NamedTuple):
    history: tuple[int, ...]
    prompt: int
    finish: FinishReason | None
    text: Any


class Cursor:
    """Where one request stands in its answer; takes part in the transactions of the state.

    `history` is every token so far, prompt first. The answer ends with a token of `end_ids`, a stop string of `text`,
    `max_tokens` tokens, or when prompt and answer fill the `context`; the first that holds in this order is the reason.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Iterable[int],
        text: TextSink,
        *,
        end_ids: Collection[int],
        max_tokens: int,
        context: int,
    ) -> None:
        self.chain = SamplerChain(sampling)
        self.history = list(prompt)
        self.prompt_tokens = len(self.history)
        self.finish: FinishReason | None = None
        self.text = text
        self._end_ids = frozenset(end_ids)
        self._last = min(self.prompt_tokens + max_tokens, context)
        self._mark = self._now()

    @property
    def generated(self) -> int:
        """Tokens drawn so far, the ending one included."""
        return len(self.history) - self.prompt_tokens

    @property
    def room(self) -> int:
        """Tokens that may still be drawn."""
        return 0 if self.finish else self._last - len(self.history)

    def take(self, logits: NDArray[np.float32]) -> Emitted:
        """Draw the next token from its logits (V,) and apply the stop rules."""
        if self.room < 1:
            raise StateError(f"this answer has ended ({self.finish or 'no room'}); no token can follow")
        drawn = self.chain.sample(logits, len(self.history), self.history)
        self.history.append(drawn.token)
        text = ""
        if drawn.token in self._end_ids:
            self.finish = "stop"
        else:
            text = self.text.push(drawn.token)
            if self.text.stop_string is not None:
                self.finish = "stop"
            elif len(self.history) == self._last:
                self.finish = "length"
        if self.finish and self.text.stop_string is None:
            text += self.text.finish()
        return Emitted(drawn.token, text, drawn.logprob, drawn.top)

    # ---- a participant of the state's transactions
    def begin(self) -> None:
        self._mark = self._now()

    def commit(self, n: int) -> None:
        """Nothing to do: `take` has advanced already, and `abort` must be able to go back even now."""

    def abort(self) -> None:
        del self.history[self._mark.tokens :]
        self.finish = self._mark.finish
        self.text.restore(self._mark.text)

    def snapshot(self) -> object:
        return _Saved(tuple(self.history), self.prompt_tokens, self.finish, self.text.mark())

    def restore(self, saved: object) -> None:
        if not isinstance(saved, _Saved) or saved.history[: saved.prompt] != tuple(self.history[: self.prompt_tokens]):
            raise StateError("a cursor can go on only from what a cursor of the same prompt has saved")
        self.history[:] = saved.history
        self.finish = saved.finish
        self.text.restore(saved.text)
        self._mark = self._now()

    def digest(self) -> bytes:
        """A hash of the tokens and of how the answer ended."""
        return hashlib.blake2b(repr((self.history, self.finish)).encode(), digest_size=16).digest()

    def _now(self) -> _Mark:
        return _Mark(len(self.history), self.finish, self.text.mark())


def verify(cursor: Cursor, drafts: Sequence[int], logits: NDArray[np.float32]) -> Verdict:
    """Advance `cursor` over a block of k drafts and its logits (k + 1, V), up to the first draft that is not drawn."""
    if len(logits) != len(drafts) + 1:
        raise StateError(f"{len(drafts)} drafts need {len(drafts) + 1} rows of logits, not {len(logits)}")
    tokens = []
    for row, draft in enumerate((*drafts, None)):
        tokens.append(cursor.take(logits[row]))
        if cursor.finish or tokens[-1].token != draft:
            break
    return Verdict(tuple(tokens), cursor.finish)
