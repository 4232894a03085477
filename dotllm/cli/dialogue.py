"""Turns of one conversation through the engine, each of which computes only what is new.

turn 1   system  user 1 | assistant ...            | checkpoint: what the next prompt is sure to repeat
turn 2   system  user 1 | reply 1  user 2 | assistant ...
         ^ from the checkpoint              ^ the next one
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from dotllm.cli.format import ChatFormat, ChatPrompt, common_prefix, plain_prompt
from dotllm.cli.run import answer_events

if TYPE_CHECKING:
    from dotllm.cli.conversation import Conversation
    from dotllm.cli.session import Session
    from dotllm.engine.request import Checkpoint, Event, Request

__all__ = ["Dialogue"]

KEPT = 3  # checkpoints: for the next turn, and to take back a turn or two


class Dialogue:
    """Keeps the checkpoints; `settings` is the request of each reply, but for its prompt."""

    def __init__(self, session: Session, chat_format: ChatFormat | None, settings: Request) -> None:
        self._session, self._format, self._settings = session, chat_format, settings
        self._checkpoints: list[Checkpoint] = []

    def prompt(self, conversation: Conversation) -> ChatPrompt:
        """What the model is given for the next reply."""
        if self._format is None:
            return plain_prompt(conversation, self._session.tokenizer)
        return self._format.prompt(conversation.messages())

    def reply(self, prompt: ChatPrompt, *, attempt: int = 0) -> Generator[Event]:
        """Events of one reply; `attempt` n > 0 draws other words. Raises ContextOverflow and what the engine raises."""
        resume = self._fitting(prompt.tokens)
        start = 0 if resume is None else len(resume.tokens)
        wanted = min(prompt.stable, len(prompt.tokens) - 1)
        sampling = self._settings.sampling
        request = replace(
            self._settings,
            prompt=prompt.tokens,
            sampling=replace(sampling, seed=(sampling.seed + attempt) % (1 << 64)),
            checkpoint=wanted if wanted > start else None,
            resume=resume,
        )
        with closing(answer_events(self._session, request)) as events:
            for event in events:
                if event.checkpoint is not None:
                    self._keep(event.checkpoint)
                else:
                    yield event

    def forget(self) -> None:
        """Release all checkpoints."""
        while self._checkpoints:
            self._checkpoints.pop().release()

    def _fitting(self, tokens: tuple[int, ...]) -> Checkpoint | None:
        """The longest checkpoint that begins this prompt; those that do not begin it are released."""
        for checkpoint in list(self._checkpoints):
            length = len(checkpoint.tokens)
            if length >= len(tokens) or common_prefix(checkpoint.tokens, tokens) < length:
                self._checkpoints.remove(checkpoint)
                checkpoint.release()
        return max(self._checkpoints, key=lambda c: len(c.tokens), default=None)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.append(checkpoint)
        while len(self._checkpoints) > KEPT:
            self._checkpoints.pop(0).release()
