"""From what the user typed to a model file."""

from __future__ import annotations

import errno
import importlib.resources
import os
import re
from pathlib import Path

from dotllm.errors import ModelFileError, UsageError

__all__ = ["demo_model", "is_demo", "model_path"]

DEMO = "story-q8_0.gguf"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def demo_model() -> Path:
    """The story model that is part of the package."""
    return Path(str(importlib.resources.files("dotllm").joinpath("data", DEMO)))


def is_demo(path: Path) -> bool:
    return path == demo_model()


def model_path(argument: str | None, flag: str | None = None) -> Path:
    """The file that MODEL, --model or DOTLLM_MODEL names, or the demo model. Raises UsageError or ModelFileError."""
    if argument is not None and flag is not None:
        raise UsageError(f"the model is named twice, as {argument!r} and with --model {flag!r}; leave one out")
    name = argument or flag or os.environ.get("DOTLLM_MODEL")
    if not name:
        return demo_model()
    path = Path(name)
    try:
        if path.exists():
            return path
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # such a name is no file: a prompt, perhaps
            raise ModelFileError(f"{name}: cannot be opened: {error.strerror}") from error
    if name.lower().endswith(".gguf"):
        raise ModelFileError(f"{name}: no such file")
    if _REPOSITORY.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a file, and looks like a repository on Hugging Face: this version does not download "
            "(a `pull` command will); fetch the .gguf file yourself and give its path"
        )
    raise UsageError(
        f"{name!r} is not a file: MODEL is the path of a .gguf file (to prompt the story model, use -p TEXT)"
    )
