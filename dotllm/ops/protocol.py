"""The operations that every model is made of: names, shapes, units, formulas.

`reference.py` (NumPy) is their executable definition; `kernels_cpu` and later `kernels_cuda` implement the same names
with the same signatures. Models call these and nothing else: no arithmetic on arrays happens outside an implementation.

Notation: M rows in the batch, E embedding width, N and K outputs and inputs of a matrix, H query heads, G key/value
heads, D head width, S sequences in the batch. All activations are float32 and contiguous. The value of a row never
depends on the other rows, on the number of threads or on how a prompt was cut (DESIGN: row-stable kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.reader import Tensor

__all__ = ["PAGE", "Activation", "Array", "CacheType", "KvLayer", "Ops", "Prepared", "RowTable", "Rows", "Weight"]

PAGE = 32
"""Positions in one page of a key/value cache; also the tile that attention walks in."""

Array: TypeAlias = Any
"""A buffer of the backend: a NumPy array on a CPU, a device array on a GPU."""

Prepared: TypeAlias = Any
"""Opaque: M rows of K values, rounded the way the weights that will consume them ask for."""

Activation = Literal["silu", "gelu"]
CacheType = Literal["f32", "f16"]


class Weight(Protocol):
    """Opaque handle of a matrix (N, K), or of a stack of X such matrices (X, N, K) for experts."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class RowTable(Protocol):
    """Opaque handle of a matrix (V, E) whose rows are looked up, not multiplied: a token embedding."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one attention layer: each (pages, G, PAGE, D), float32, or float16 bits in uint16."""

    k: Array
    v: Array


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a batch stands in the history of its sequence. All arrays int32.

    Rows of one sequence are neighbours and in order of position: `starts[s] .. starts[s + 1]`. Position p of sequence
    s lives in page `pages[s, p // PAGE]`, slot `p % PAGE`. A recurrent layer reads plane `read[s]` and writes plane
    `write[s]` of its state.
    """

    starts: NDArray[np.int32]  # (S + 1,)
    sequence: NDArray[np.int32]  # (M,), index of the sequence in this batch
    positions: NDArray[np.int32]  # (M,)
    pages: NDArray[np.int32]  # (S, P)
    read: NDArray[np.int32]  # (S,)
    write: NDArray[np.int32]  # (S,)

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """The fields in order: Rows(*rows.arrays) is rows."""
        return self.starts, self.sequence, self.positions, self.pages, self.read, self.write


class Ops(Protocol):
    """A backend. Buffers named `out` are written; nothing else is, except where a docstring says so."""

    name: str

    def recorded(
        self,
        owner: Any,
        key: Hashable,
        build: Callable[..., Any],
        inputs: Sequence[NDArray[np.int32]],
        buffers: Sequence[Array] = (),
    ) -> Any:
        """build(*inputs), which calls ops and nothing else that must happen again.

        A backend may record the ops of the first call and run the record in later ones with the same key, shapes of
        inputs and places of `buffers`: other values of the inputs, the same memory for everything else. The result is
        what the first call returned, the same arrays with new contents. A record lives as long as its owner, which is
        an object that can be weakly referenced; the owner of records that touch memory must change with that memory.
        """

    # ---- loading and moving
    def load(self, tensor: Tensor, rows: NDArray[np.int64] | None = None) -> Weight:
        """A matrix or a stack of matrices of any supported quant type; `rows` selects and orders its rows (axis N)."""

    def load_table(self, tensor: Tensor) -> RowTable:
        """A token embedding (V, E)."""

    def load_vector(self, tensor: Tensor) -> Array:
        """A small tensor (norm, bias, convolution taps) as float32 of the tensor's shape."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """A float32 buffer with undefined contents."""

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> Array:
        """A zeroed buffer; `dtype` "f32", or "f16" for float16 bits."""

    def put(self, array: NDArray[Any]) -> Array:
        """A host array on the backend (same dtype)."""

    def get(self, array: Array) -> NDArray[Any]:
        """A copy on the host."""

    def gather(self, x: Array, index: NDArray[np.int32], out: Array) -> None:
        """out[i] = x[index[i]]; x (M, E), out (len(index), E)."""

    def copy(self, source: Array, target: Array) -> None:
        """target[...] = source; same shape."""

    # ---- rows in
    def embed(self, table: RowTable, ids: NDArray[np.int32], scale: float, out: Array) -> None:
        """out[i] = table[ids[i]] * scale; ids (M,), out (M, E)."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, *, add: bool = False, column: int = 0) -> None:
        """y = x / sqrt(mean(x^2) + eps) * weight; out[:, column : column + E] = y, or += y with `add`."""

    def prepare(self, x: Array, norm: Array | None, eps: float, weights: Sequence[Weight]) -> Prepared:
        """rms_norm(x, norm) (x itself if `norm` is None), rounded as ggml rounds the activations of these weights.

        The result holds until the next `prepare`; what `gated_linear` returns, until the next `gated_linear`.
        """

    def linear(
        self,
        x: Prepared,
        weights: Sequence[Weight],
        outs: Sequence[Array],
        biases: Sequence[Array | None] | None = None,
        *,
        add: bool = False,
    ) -> None:
        """outs[j] = x @ weights[j].T + biases[j], or += with `add`; x (M, K), outs[j] (M, N_j)."""

    def gated_linear(self, x: Prepared, gate: Weight, up: Weight, act: Activation, down: Weight) -> Prepared:
        """act(x @ gate.T) * (x @ up.T), prepared for `down`."""

    # ---- attention
    def rope_table(self, inverse_frequency: NDArray[np.float64], scale: float, length: int) -> Array:
        """(2, length, n): cos and sin of position * scale * inverse_frequency[j]; a frequency of 0 is no turn."""

    def qk_norm_rope(
        self,
        q: Array,
        k: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        positions: NDArray[np.int32],
        table: Array,
        *,
        adjacent: bool,
    ) -> None:
        """In place: per head RMS norm over D (if weights are given), then rotary embedding of the first 2n values.

        q (M, H, D), k (M, G, D). Pairs are (j, j + n), or (2j, 2j + 1) if `adjacent`; values beyond 2n stay.
        (a, b) -> (a cos - b sin, b cos + a sin)
        """

    def kv_store(self, kv: KvLayer, rows: Rows, k: Array, v: Array) -> None:
        """Write keys and values (M, G, D) of this batch to their pages, in the cache's dtype."""

    def attention(
        self, q: Array, kv: KvLayer, rows: Rows, scale: float, window: int, gate: Array | None, out: Array
    ) -> None:
        """Causal attention over pages; q, gate, out (M, H, D); query head h reads head h // (H // G).

        out = softmax(scale q.k_j) v_j over 0 <= p - j (< window if window > 0), times sigmoid(gate) if given.
        The rows' own keys must have been stored: they too are read from the cache.
        """

    # ---- Gated DeltaNet (C convolution taps, HK key heads, HV value heads of width D; W = 2 HK D + HV D)
    def conv_silu_l2(
        self, u: Array, taps: Array, conv: Array, rows: Rows, eps: float, q: Array, k: Array, v: Array
    ) -> None:
        """Causal depthwise convolution over time, SiLU, then l2 norm of each q and k head.

        u (M, W) raw rows; taps (W, C), the last multiplies the current row; conv (planes, C - 1, W): plane read[s]
        holds the rows before the batch, plane write[s] receives the last C - 1 raw rows after it.
        q, k (M, HK, D) = c / sqrt(sum(c^2) + eps); v (M, HV, D).
        """

    def gdn_gates(self, alpha: Array, beta: Array, a: Array, dt: Array, g: Array, b: Array) -> None:
        """g = a * softplus(alpha + dt) (log decay, <= 0); b = sigmoid(beta). All (M, HV), a and dt (HV,)."""

    def gated_delta(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        b: Array,
        key_head: NDArray[np.int32],
        state: Array,
        rows: Rows,
        out: Array,
    ) -> None:
        """The gated delta rule, row after row; state (planes, HV, Dv, Dk): reads plane read[s], writes plane write[s].

        With kh = key_head[h], for each row: S *= exp(g);  d = b (v - S k);  S += d k^T;  out = S q / sqrt(D).
        """

    def gated_norm(self, x: Array, weight: Array, z: Array, eps: float) -> None:
        """In place: x = rms_norm(x, weight) * silu(z), per head; x, z (M, HV, D), weight (D,)."""

    # ---- experts
    def route(self, logits: Array, used: int, scale: float) -> tuple[Array, Array]:
        """ids int32 (M, used) and weights (M, used): the `used` largest of softmax(logits), ties to the lowest id.

        weights = p / max(sum of the chosen p, 6.103515625e-05) * scale; highest first.
        """

    def experts(
        self,
        x: Prepared,
        gate: Weight,
        up: Weight,
        down: Weight,
        act: Activation,
        ids: Array,
        weights: Array,
        out: Array,
    ) -> None:
        """out += sum over the chosen experts e, in rank order, of weights_e * down_e(act(gate_e x) * up_e x).

        out (M, E); the sum is complete before it is added.
        """

    def gated_add(self, x: Array, gate: Array, out: Array) -> None:
        """out += sigmoid(gate) * x; x, out (M, E), gate (M, 1)."""

    # ---- rows out
    def softcap(self, x: Array, cap: float) -> None:
        """In place: x = cap * tanh(x / cap)."""
