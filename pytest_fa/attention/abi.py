"""The C interfaces of `include/`: the fields of their structs in order, and the codes of values.

A part that adds a field to the struct adds it here, to the header, to the binding and to `candidate/cuda_forward.py`.
"""

from __future__ import annotations

from typing import Literal

from pytest_fa.attention.dtypes import FORMATS

FieldKind = Literal["uint32", "uint64", "int32", "int64", "float", "pointer", "strides"]

DTYPE_CODES = {name: each.code for name, each in FORMATS.items()}
CACHE_DTYPE_CODES = {"e4m3": DTYPE_CODES["e4m3"], "int8": 4}
CAUSAL_CODES = {"none": 0, "top_left": 1, "bottom_right": 2}

# `FaForwardArgs`
FIELDS: tuple[tuple[str, FieldKind], ...] = (
    ("abi_version", "uint32"),
    ("struct_size", "uint32"),
    ("q", "pointer"),
    ("k", "pointer"),
    ("v", "pointer"),
    ("out", "pointer"),
    ("lse", "pointer"),
    ("workspace", "pointer"),
    ("workspace_bytes", "uint64"),
    ("batch", "int64"),
    ("heads", "int64"),
    ("kv_heads", "int64"),
    ("seq_q", "int64"),
    ("seq_k", "int64"),
    ("head_dim", "int64"),
    ("q_stride", "strides"),
    ("k_stride", "strides"),
    ("v_stride", "strides"),
    ("out_stride", "strides"),
    ("dtype", "int32"),
    ("causal", "int32"),
    ("scale", "float"),
    ("out_dtype", "int32"),
    ("q_descale", "pointer"),
    ("k_descale", "pointer"),
    ("v_descale", "pointer"),
    ("message", "pointer"),
    ("message_bytes", "uint64"),
    ("features", "uint32"),
    ("softcap", "float"),
    ("window_left", "int64"),
    ("window_right", "int64"),
    ("sink", "pointer"),
    ("alibi_slopes", "pointer"),
    ("bias", "pointer"),
    ("mask", "pointer"),
    ("bias_stride", "strides"),
    ("mask_stride", "strides"),
    ("head_dim_v", "int64"),
    ("seqlens_q", "pointer"),
    ("seqlens_k", "pointer"),
    ("block_table", "pointer"),
    ("block_table_stride", "int64"),
    ("page_size", "int64"),
    ("cache_dtype", "int32"),
    ("k_scale", "pointer"),
    ("v_scale", "pointer"),
    ("k_scale_stride", "strides"),
    ("v_scale_stride", "strides"),
    ("cu_seqlens_q", "pointer"),
    ("cu_seqlens_k", "pointer"),
    ("rows_q", "int64"),
    ("k_new", "pointer"),
    ("v_new", "pointer"),
    ("k_new_stride", "strides"),
    ("v_new_stride", "strides"),
    ("rows_k", "int64"),
)
# `FaBackwardArgs`
BACKWARD_FIELDS: tuple[tuple[str, FieldKind], ...] = (
    ("struct_size", "uint64"),
    ("forward", "pointer"),
    ("dout", "pointer"),
    ("dlse", "pointer"),
    ("dq", "pointer"),
    ("dk", "pointer"),
    ("dv", "pointer"),
    ("dout_stride", "strides"),
    ("dq_stride", "strides"),
    ("dk_stride", "strides"),
    ("dv_stride", "strides"),
    ("dbias", "pointer"),
    ("dsink", "pointer"),
    ("dbias_stride", "strides"),
)
# The words of a backward call besides those of its forward pass.
OF_BACKWARD = frozenset(("dout", "dlse", "forward_out", "forward_lse"))
# The bits of `features`, of the fields that a kernel reads only if the bit is set: `FaFeature`.
FEATURES = {
    "softcap": 1,
    "window_left": 2,
    "window_right": 4,
    "sink": 8,
    "alibi_slopes": 16,
    "bias": 32,
    "mask": 64,
    "head_dim_v": 128,
    "seqlens_q": 256,
    "seqlens_k": 512,
    "block_table": 1024,
    "cache_dtype": 2048,
    "cu_seqlens_q": 4096,
    "cu_seqlens_k": 8192,
    "k_new": 16384,  # and of v_new
}
# The words that are tensors of parts, each with its field.
TENSORS = {
    "sink": "sink",
    "alibi_slopes": "alibi_slopes",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "seqlens_q": "seqlens_q",
    "seqlens_k": "seqlens_k",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_k",
    "k_new": "k_new",
    "v_new": "v_new",
    "block_table": "block_table",
}
# The words that are numbers and have a field of another name.
NUMBERS = {"max_seqlen_q": "seq_q", "max_seqlen_k": "seq_k"}
# The last arguments of the binding, in its order: what only some calls have.
FURTHER = (*(word for word in TENSORS if word != "block_table"), *NUMBERS, "block_table")
# The fields whose values have a code.
CODES = {
    "dtype": DTYPE_CODES,
    "causal": CAUSAL_CODES,
    "out_dtype": DTYPE_CODES,
    "cache_dtype": CACHE_DTYPE_CODES,
}
