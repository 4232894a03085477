"""What all families share: loading with shape checks, work buffers, the protocol between a model and the engine."""

from __future__ import annotations

import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dotllm.batch import Batch
from dotllm.errors import ModelFileError
from dotllm.gguf.hparams import ModelConfig, RopeConfig
from dotllm.gguf.reader import GGUFFile, Tensor
from dotllm.ops.protocol import Array, KvLayer, Ops, Rows, RowTable, Weight
from dotllm.ops.rope import inverse_frequencies
from dotllm.state.step import Step

__all__ = ["Loader", "Model", "MtpHead", "Workspace", "flat"]

_BLOCK = re.compile(r"blk\.(\d{1,4})\.")


class MtpHead(Protocol):
    """A multi-token prediction head: row i = (token t_i, hidden of the position before it) predicts t_(i + 1)."""

    def forward(
        self, tokens: NDArray[np.int32], hidden: Array, rows: Rows, kv: KvLayer, *, logits: bool
    ) -> tuple[Array | None, Array]: ...


class Model(Protocol):
    """A causal language model. Results are valid until the next call."""

    config: ModelConfig
    mtp: MtpHead | None

    def forward(self, batch: Batch, step: Step) -> Array:
        """Hidden rows (M, E) after the final norm."""

    def logits(self, hidden: Array, rows: NDArray[np.int32]) -> Array:
        """Logits (len(rows), V) of the chosen rows."""


def flat(x: Array) -> Array:
    """The same buffer as (M, N)."""
    return x.reshape(x.shape[0], -1)


class Workspace:
    """Named float32 work buffers that grow to the greatest number of rows seen and then stay where they are."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}

    def rows(self, name: str, rows: int, *width: int) -> Array:
        """A buffer (rows, *width); the same name and width give the same memory."""
        buffer = self._buffers.get((name, width))
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name, width] = self._ops.empty((rows, *width))
        return buffer[:rows]


class Loader:
    """Reads the tensors of one file, checks their shapes against the configuration, and hands them to the backend."""

    def __init__(self, file: GGUFFile, config: ModelConfig, ops: Ops, context: int) -> None:
        self.file, self.config, self.ops, self.context = file, config, ops, context
        self.workspace = Workspace(ops)
        self._rope_tables: dict[RopeConfig, Array] = {}
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def unused(self) -> list[str]:
        """Tensors that nothing has asked for, but those of MTP blocks: a draft can do without, an answer cannot."""
        return [name for name in self.file.tensors if name not in self._used and not self._of_mtp(name)]

    def _of_mtp(self, name: str) -> bool:
        block = _BLOCK.match(name)
        return block is not None and int(block[1]) >= len(self.config.layers)

    def check(self, name: str, *shape: int) -> None:
        """Raise ModelFileError unless there is such a tensor: before memory is spent on what metadata say alone."""
        self._tensor(name, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.file.tensor(name)
        self._used.add(name)
        if tensor.shape != shape:
            raise ModelFileError(
                f"{self.file.path}: tensor {name} has shape {list(tensor.shape)}, but the metadata of this "
                f"{self.config.architecture} model ask for {list(shape)}; the file is damaged or wrongly converted"
            )
        return tensor

    def matrix(self, name: str, *shape: int, rows: NDArray[np.int64] | None = None) -> Weight:
        """A weight (N, K), or experts (X, N, K); `rows` selects and orders its N."""
        return self.ops.load(self._tensor(name, shape), rows)

    def table(self, name: str, *shape: int) -> RowTable:
        return self.ops.load_table(self._tensor(name, shape))

    def vector(self, name: str, *shape: int) -> Array:
        return self.ops.load_vector(self._tensor(name, shape))

    def optional_vector(self, name: str, *shape: int) -> Array | None:
        return self.vector(name, *shape) if self.has(name) else None

    def rope_table(self, rope: RopeConfig) -> Array:
        if rope not in self._rope_tables:
            divisors: Any = None
            if self.has("rope_freqs.weight"):
                divisors = self.ops.get(self.vector("rope_freqs.weight", rope.dimension // 2))
            frequencies = inverse_frequencies(rope, divisors)
            self._rope_tables[rope] = self.ops.rope_table(frequencies, rope.scale, self.context)
        return self._rope_tables[rope]
