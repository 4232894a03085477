"""Write a story model as GGUF (architecture `qwen35`): f32, q8_0, or the mix of types that llama.cpp calls Q4_K_M."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from numpy.typing import NDArray

from .model import EPS, Config, GatedAttention, GatedDeltaNet, StoryModel
from .tokenizer import END, SPECIALS

__all__ = ["FILE_TYPES", "write"]

FILE_TYPES = {"f32": 0, "q8_0": 7, "q4_k_m": 15}
"""Name -> general.file_type."""

Array = NDArray[Any]
Quantiser = Callable[[Array, Quant], Array]
"""(matrix float32 (N, K), type) -> bytes (N, K / block * block bytes)."""

MIXERS = {
    GatedAttention: {
        "attn_q": "q",
        "attn_k": "k",
        "attn_v": "v",
        "attn_output": "out",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
    },
    GatedDeltaNet: {
        "attn_qkv": "qkv",
        "attn_gate": "gate",
        "ssm_alpha": "alpha",
        "ssm_beta": "beta",
        "ssm_norm": "norm",
        "ssm_out": "out",
    },
}
FEED_FORWARD = {
    "attn_norm": "attn_norm",
    "post_attention_norm": "ffn_norm",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_down": "ffn_down",
}
NEXTN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "mtp_norm"}


def _block(prefix: str, block: Any) -> Iterator[tuple[str, Any]]:
    for name, attribute in FEED_FORWARD.items():
        yield f"{prefix}{name}.weight", getattr(block, attribute).weight
    for name, attribute in MIXERS[type(block.mix)].items():
        yield f"{prefix}{name}.weight", getattr(block.mix, attribute).weight
    if not block.attention:
        yield f"{prefix}ssm_conv1d.weight", block.mix.conv
        yield f"{prefix}ssm_a", -block.mix.a_log.exp()
        yield f"{prefix}ssm_dt.bias", block.mix.dt_bias


def tensors(model: StoryModel) -> Iterator[tuple[str, Array]]:
    """GGUF name and float32 array of each tensor, [out, in] as in PyTorch; the MTP block is the last block."""

    def parameters() -> Iterator[tuple[str, Any]]:
        yield "token_embd.weight", model.embed.weight
        yield "output_norm.weight", model.norm.weight
        for i, block in enumerate([*model.blocks, model.mtp]):
            yield from _block(f"blk.{i}.", block)
        for name, attribute in NEXTN.items():
            yield f"blk.{model.c.layers}.nextn.{name}.weight", getattr(model, attribute).weight

    for name, p in parameters():
        yield name, np.ascontiguousarray(p.detach().numpy(), np.float32)


class TypeChooser:
    """Which tensor gets which type; for q4_k_m by the rule of llama-quantize for the tensors of this architecture."""

    def __init__(self, file_type: str, layers: int) -> None:
        self._file_type = file_type
        self._layers = layers
        self._seen = {"values": 0, "down": 0}

    def choose(self, name: str, array: Array) -> Quant:
        small = array.ndim < 2 or "_norm.weight" in name or "ssm_conv1d" in name
        if self._file_type == "f32" or small:
            return Quant.F32
        if self._file_type == "q8_0":
            return Quant.Q8_0
        if name == "token_embd.weight":
            return Quant.Q6_K
        if "attn_v." in name or "attn_qkv." in name:
            return self._more_bits("values")
        return self._more_bits("down") if "ffn_down." in name else Quant.Q4_K

    def _more_bits(self, kind: str) -> Quant:
        """Q6_K in the first and last eighth of the layers and in every third between, Q4_K elsewhere."""
        i, eighth = self._seen[kind], self._layers // 8
        self._seen[kind] += 1
        more = i < eighth or i >= 7 * self._layers // 8 or (i - eighth) % 3 == 2
        return Quant.Q6_K if more else Quant.Q4_K


def _sizes(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_block_count(c.layers + 1)
    w.add_context_length(c.context)
    w.add_embedding_length(c.dim)
    w.add_feed_forward_length(c.ffn)
    w.add_head_count(c.heads)
    w.add_head_count_kv(c.kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_freq_base(c.theta)
    w.add_rope_dimension_count(c.rotary)
    third = c.rotary // 6
    w.add_rope_dimension_sections([c.rotary // 2 - 2 * third, third, third, 0])
    for key, value in (
        ("ssm.conv_kernel", c.conv),
        ("ssm.state_size", c.gdn_dim),
        ("ssm.group_count", c.key_heads),
        ("ssm.time_step_rank", c.value_heads),
        ("ssm.inner_size", c.value_dim),
        ("full_attention_interval", c.interval),
        ("nextn_predict_layers", 1),
    ):
        w.add_uint32(f"qwen35.{key}", value)


def _vocabulary(w: gguf.GGUFWriter, tokenizer: str) -> None:
    """From the JSON of a `tokenizers` BPE. No chat template: a base model, which never saw the chat specials."""
    parsed = json.loads(tokenizer)
    ids = {**parsed["model"]["vocab"], **{t["content"]: t["id"] for t in parsed["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in parsed["model"]["merges"]])
    w.add_bos_token_id(ids[END])
    w.add_eos_token_id(ids[END])
    w.add_eot_token_id(ids["<|im_end|>"])
    w.add_pad_token_id(ids[END])
    w.add_add_bos_token(False)


def write(path: Path, model: StoryModel, tokenizer: str, file_type: str, quantise: Quantiser) -> None:
    """Write `model` with its tokenizer (JSON) to `path`, at once or not at all."""
    part = path.with_suffix(".part")
    w = gguf.GGUFWriter(part, "qwen35")
    w.add_type("model")
    w.add_name("dotllm story")
    w.add_basename("dotllm-story")
    w.add_size_label(f"{sum(array.size for _, array in tensors(model)) / 1e6:.1f}M")
    w.add_description("A tiny hybrid (Gated DeltaNet and attention) with a trained MTP head; it writes fairy tales.")
    w.add_license("CC0-1.0")
    w.add_license_name("CC0 1.0 Universal; trained only on public-domain texts")
    w.add_languages(["en"])
    w.add_file_type(FILE_TYPES[file_type])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _sizes(w, model.c)
    _vocabulary(w, tokenizer)
    chooser = TypeChooser(file_type, model.c.layers + 1)
    for name, array in tensors(model):
        kind = chooser.choose(name, array)
        if kind == Quant.F32:
            w.add_tensor(name, array)
        else:
            w.add_tensor(name, quantise(array, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(part, path)
