"""The error tree. A message says what is wrong, where, and what to do; `exit_code` is what the command line returns."""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "ConstraintError",
    "ContextOverflow",
    "DotLLMError",
    "ModelFileError",
    "OutOfMemory",
    "StateError",
    "TemplateError",
    "UnsupportedModel",
    "UsageError",
]


class DotLLMError(Exception):
    """Base of every error that dotllm raises on purpose."""

    exit_code = 1


class UsageError(DotLLMError):
    """The request cannot be carried out as asked (bad parameter, missing prompt)."""

    exit_code = 2


class ModelFileError(DotLLMError):
    """The file is not a well-formed GGUF model."""

    exit_code = 3


class UnsupportedModel(ModelFileError):
    """The file is well-formed, but its architecture, tensor type or tokenizer is not supported."""


class OutOfMemory(DotLLMError):
    """What was asked for does not fit in memory or in the block pool."""

    exit_code = 4


class BackendUnavailable(DotLLMError):
    """The requested backend or instruction set does not exist on this machine."""

    exit_code = 5


class ContextOverflow(DotLLMError):
    """Prompt and reply do not fit in the context."""


class ConstraintError(DotLLMError):
    """A grammar, schema or pattern is invalid or cannot be satisfied."""


class TemplateError(DotLLMError):
    """The chat template refused the conversation, or exceeded its limits."""


class StateError(DotLLMError):
    """What the state of a sequence does not allow, such as cutting a recurrent state without a snapshot."""
