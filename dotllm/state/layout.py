"""What the state of one model is made of: shapes of every cache, and the bytes they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dotllm.errors import StateError
from dotllm.ops.protocol import PAGE, CacheType

__all__ = ["KvShape", "LayerKinds", "RecurrentShape", "StateBytes", "StateLayout"]

_ITEM = {"f32": 4, "f16": 2}


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one attention layer."""

    heads: int
    width: int

    def page_bytes(self, cache_type: CacheType) -> int:
        """Bytes of one page of keys and values."""
        return 2 * self.heads * PAGE * self.width * _ITEM[cache_type]


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A Gated DeltaNet layer: HK key heads and HV value heads of width D, C convolution taps.

    `key_head[h]` is the key head that value head h reads.
    """

    taps: int
    key_heads: int
    value_heads: int
    width: int
    key_head: tuple[int, ...]

    @property
    def channels(self) -> int:
        """W = 2 HK D + HV D: queries, keys and values side by side, as the convolution sees them."""
        return (2 * self.key_heads + self.value_heads) * self.width

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane: S (HV, D, D) and the window (C - 1, W)."""
        return 4 * (self.value_heads * self.width * self.width + (self.taps - 1) * self.channels)

    @property
    def row_bytes(self) -> int:
        """Bytes of one logged row: u, q, k, v, g, b."""
        return 4 * (2 * self.channels + 2 * self.value_heads)

    @property
    def output_bytes(self) -> int:
        """Bytes of one row of the layer's output, which a replay computes and drops."""
        return 4 * self.value_heads * self.width


class LayerKinds(Protocol):
    """The part of a layer's configuration that its state depends on."""

    @property
    def kind(self) -> str: ...
    @property
    def kv_heads(self) -> int: ...


class _Recurrent(Protocol):
    @property
    def state_size(self) -> int: ...
    @property
    def k_heads(self) -> int: ...
    @property
    def v_heads(self) -> int: ...
    @property
    def conv_kernel(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...


class _Config(Protocol):
    @property
    def layers(self) -> Sequence[LayerKinds]: ...
    @property
    def mtp(self) -> LayerKinds | None: ...
    @property
    def recurrent(self) -> _Recurrent | None: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def embedding_length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each part of the state."""

    kv: int
    recurrent: int
    log: int
    mtp: int
    pending: int

    @property
    def total(self) -> int:
        return self.kv + self.recurrent + self.log + self.mtp + self.pending


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shapes of the state of a model. `index[i]` is the place of layer i among the layers of its kind."""

    kv: tuple[KvShape, ...]
    recurrent_layers: int
    recurrent: RecurrentShape | None
    mtp: KvShape | None
    embedding: int
    index: tuple[int, ...]

    @classmethod
    def of(cls, config: _Config) -> StateLayout:
        """The layout of a model's configuration (`ModelConfig`)."""
        kv: list[KvShape] = []
        index: list[int] = []
        recurrent = 0
        for layer in config.layers:
            if layer.kind == "recurrent":
                index.append(recurrent)
                recurrent += 1
            else:
                index.append(len(kv))
                kv.append(KvShape(layer.kv_heads, config.head_dim))
        shape = _recurrent_shape(config.recurrent) if config.recurrent is not None and recurrent else None
        if recurrent and shape is None:
            raise StateError(f"the configuration has {recurrent} recurrent layers, but no shape for them")
        mtp = None if config.mtp is None else KvShape(config.mtp.kv_heads, config.head_dim)
        return cls(tuple(kv), recurrent, shape, mtp, config.embedding_length, tuple(index))

    def estimate(
        self, *, pages: int, sequences: int, cache_type: CacheType, mtp: bool, logged_rows: int, pending_rows: int = 0
    ) -> StateBytes:
        """Bytes of a state with logs of `logged_rows` rows a layer; nothing is allocated."""
        shape, layers = self.recurrent, self.recurrent_layers
        return StateBytes(
            kv=pages * sum(layer.page_bytes(cache_type) for layer in self.kv),
            recurrent=0 if shape is None else (2 * sequences * layers + 1) * shape.plane_bytes,
            log=0 if shape is None else logged_rows * (layers * shape.row_bytes + shape.output_bytes),
            mtp=pages * self.mtp.page_bytes(cache_type) if mtp and self.mtp is not None else 0,
            pending=4 * self.embedding * pending_rows,
        )


def _recurrent_shape(config: _Recurrent) -> RecurrentShape:
    keys, values = config.k_heads, config.v_heads
    group = values // keys
    key_head = tuple(head // group if config.interleaved else head % keys for head in range(values))
    return RecurrentShape(config.conv_kernel, keys, values, config.state_size, key_head)
