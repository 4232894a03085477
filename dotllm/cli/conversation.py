"""A conversation as data: turns that can be taken back, saved and loaded."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dotllm.errors import UsageError

__all__ = ["Conversation", "Turn"]

_FORMAT = "dotllm conversation 1"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and the reply so far; `reasoning` is what the model thought before it."""

    user: str
    reply: str = ""
    reasoning: str = ""


@dataclass(slots=True)
class Conversation:
    """Turns in order, behind an optional system prompt. Methods leave it as it was when they raise."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self.turns.append(Turn(text))

    def answer(self, reply: str, reasoning: str = "") -> None:
        """Set the reply of the last turn."""
        self.turns[-1] = replace(self._last(), reply=reply, reasoning=reasoning)

    def undo(self) -> Turn:
        """Take back the last turn, question and reply."""
        last = self._last()
        self.turns.pop()
        return last

    def regenerate(self) -> Turn:
        """Drop the last reply, its question stays; returns the turn as it was."""
        before = self._last()
        self.turns[-1] = Turn(before.user)
        return before

    def messages(self) -> list[dict[str, Any]]:
        """For a chat template: the last question has no reply yet if its reply is empty."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            if turn.reply or turn.reasoning:
                reply: dict[str, Any] = {"role": "assistant", "content": turn.reply}
                if turn.reasoning:
                    reply["reasoning_content"] = turn.reasoning
                messages.append(reply)
        return messages

    def save(self, path: Path, model: str) -> None:
        """Write a JSON file, whole or not at all; never over a file that is something else."""
        content = {"format": _FORMAT, "model": model, "messages": self.messages()}
        try:
            if path.exists() and not _is_ours(path):
                raise UsageError(f"{path}: exists and is not a saved conversation; choose another name")
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
            try:
                # a lone surrogate has no UTF-8 form; with a backslash it is what JSON calls it
                with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                    json.dump(content, file, ensure_ascii=False, indent=1)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except (OSError, ValueError) as error:  # ValueError: a name that holds a zero byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{path}: cannot be written: {reason}") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read a saved conversation; raises UsageError for anything else."""
        return cls._from_messages(path, _read(path)["messages"])

    def _last(self) -> Turn:
        if not self.turns:
            raise UsageError("nothing has been said yet")
        return self.turns[-1]

    @classmethod
    def _from_messages(cls, path: Path, messages: list[Any]) -> Conversation:
        conversation = cls()
        before = "start"
        allowed = {"start": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}
        for number, message in enumerate(messages, 1):
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            reasoning = message.get("reasoning_content", "") if isinstance(message, dict) else ""
            if role not in allowed[before] or not isinstance(content, str) or not isinstance(reasoning, str):
                raise UsageError(
                    f"{path}: message {number} must be an object with a text in 'content' and role "
                    f"{' or '.join(allowed[before])}"
                )
            if role == "system":
                conversation.system = content
            elif role == "user":
                conversation.ask(content)
            else:
                conversation.answer(content, reasoning)
            before = role
        return conversation


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; not a saved conversation")
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a saved conversation: {error}") from error
    if (
        not isinstance(content, dict)
        or content.get("format") != _FORMAT
        or not isinstance(content.get("messages"), list)
    ):
        raise UsageError(f"{path}: not a saved conversation (its 'format' must be {_FORMAT!r})")
    return content


def _is_ours(path: Path) -> bool:
    try:
        _read(path)
    except UsageError:
        return False
    return True
