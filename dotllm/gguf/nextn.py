"""Which blocks of a file are main layers and which is the multi-token prediction (NextN) head.

Converters disagree: `block_count` counts the head's block or not, and the key `nextn_predict_layers` may be there
without the tensors or the tensors without the key. The tensors decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from dotllm.errors import UnsupportedModel
from dotllm.gguf.keys import Keys
from dotllm.gguf.reader import GGUFFile

__all__ = ["Blocks", "count_blocks"]

MAX_BLOCKS = 1024
_NEXTN_NAME = re.compile(r"blk\.(\d{1,4})\.nextn\.")
_ALWAYS = (
    "attn_norm.weight",
    "post_attention_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "nextn.eh_proj.weight",
    "nextn.enorm.weight",
    "nextn.hnorm.weight",
)
_DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_EXPERTS = ("ffn_gate_inp.weight", "ffn_down_exps.weight")


@dataclass(frozen=True, slots=True)
class Blocks:
    """`main` layers, then perhaps the head at index `mtp`; `total` blocks in all; `note` says why there is no head."""

    main: int
    total: int
    mtp: int | None
    note: str


def count_blocks(file: GGUFFile, keys: Keys, *, may_predict: bool) -> Blocks:
    """Tell main layers from the NextN block; raises ModelFileError if `block_count` fits neither reading."""
    names = file.tensors.keys()
    counted = keys.integer("block_count", most=MAX_BLOCKS)
    declared = keys.integer("nextn_predict_layers", 0, least=0, most=counted) if may_predict else 0
    matches = (_NEXTN_NAME.match(name) for name in names)
    heads = sorted({int(match[1]) for match in matches if match}) if may_predict else []
    if heads:
        main = heads[0]
        if not 0 < main <= counted or counted - main > len(heads) or heads != list(range(main, main + len(heads))):
            raise keys.fail("block_count", f"is {counted}, but the NextN tensors are in blocks {heads[:8]}")
    else:
        # Without the head's tensors the last block can still be an ordinary layer that the key does not mean.
        main = counted if f"blk.{counted - declared}.attn_norm.weight" in names else counted - declared
    if "blk.0.attn_norm.weight" not in names:
        raise UnsupportedModel(f"{file.path}: the main layers are not in this file; give the file of the whole model")
    if heads:
        missing = _missing(names, f"blk.{main}.")
        if missing:
            return Blocks(main, main, None, f"MTP tensors missing: {', '.join(missing)}")
        return Blocks(main, main + 1, main, "")
    if declared:
        return Blocks(main, main, None, f"MTP tensors missing: blk.{main}.nextn.*")
    return Blocks(main, main, None, "no MTP head")


def _missing(names: Collection[str], block: str) -> list[str]:
    required = list(_ALWAYS)
    if f"{block}ffn_gate_inp.weight" in names:
        required += _EXPERTS
        if f"{block}ffn_gate_up_exps.weight" not in names:
            required += ["ffn_gate_exps.weight", "ffn_up_exps.weight"]
    else:
        required += _DENSE
    return [block + name for name in required if block + name not in names]
