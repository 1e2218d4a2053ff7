"""Manifests with which attention functions of other packages are judged, without a file beside them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.fit import EVERYTHING, cases_for
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Variant

# The operator of FlashAttention-3, as its extension and that of the xformers wheel register it.
FLASH_ATTENTION_3_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "adopt.md"
LIBRARIES = "[flash_attn_3._C]"


def manifest_of(target: str) -> str:
    """The manifest of the documentation that names this target."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if target in block)
    return str(found)


# What the operator takes, too: of V, other sizes beside some of Q and K.
FLASH_ATTENTION_3 = f"""\
{manifest_of("flash_attn_3::fwd")}
variants:
  flash: {{}}
  flash_wide_v:
    supports: {{head_dim: [64], head_dim_v: [128, 256, 512]}}
  flash_narrow_v:
    supports: {{head_dim: [192], head_dim_v: [128]}}
"""
SDPA = """\
role: baseline
optional: true
entry:
  target: "torch.nn.functional:scaled_dot_product_attention"
  call: {keywords: {is_causal: causal, scale: scale, enable_gqa: true}}
supports:
  device: [cpu, cuda]
  dtype: [fp16, bf16, fp32]
  head_dim: {from: 8, to: 256, step: 8}
  head_dim_v: {from: 8, to: 256, step: 8}
  grouped_heads: true
  layout: [bhsd, bshd]
  seq_k_min: 0
variants:
  theirs:
    supports: {causal: [none, top_left]}
  theirs_masked:
    call: {keywords: {attn_mask: attn_mask, scale: scale, enable_gqa: true}}
    supports: {mask: true}
  theirs_biased:
    call: {keywords: {attn_mask: attn_bias, scale: scale, enable_gqa: true}}
    supports: {bias: true}
"""
FLEX = """\
entry:
  target: "torch.nn.attention.flex_attention:flex_attention"
  call: {keywords: {scale: scale, enable_gqa: true}}
rounds: [p]
supports:
  device: [cpu, cuda]
  dtype: [fp16, bf16, fp32]
  head_dim: {from: 8, to: 256, step: 8}
  head_dim_v: {from: 8, to: 256, step: 8}
  grouped_heads: true
  layout: [bhsd, bshd]
variants:
  flex: {}
  flex_lse:
    call: {keywords: {scale: scale, enable_gqa: true, return_lse: true}, returns: [out, lse]}
    returns: [out, lse]
"""
# Torch's kernel for the CPU, which returns a log-sum-exp.  In half precision, that is off by 5e-5: its exponential is
# approximate there.
OPERATOR = """\
role: baseline
optional: true
entry:
  target: "aten::_scaled_dot_product_flash_attention_for_cpu"
  call: {arguments: [q, k, v, 0.0, causal], keywords: {scale: scale}, returns: [out, lse]}
returns: [out, lse]
supports: {device: [cpu], dtype: [fp32], head_dim: [64, 128], causal: [none, top_left]}
"""


def cases_of(variant: Variant) -> list[Case]:
    """The cases of the suites `smoke`, `edge` and `modifiers` that a variant supports, and those of its claims.

    Claims are those of a candidate: a run does not judge them for a baseline.
    """
    suites = [case for name in ("smoke", "edge", "modifiers") for case in SUITES[name]]
    fitting = [case for case in cases_for(variant, tuple(suites), EVERYTHING) if not variant.refuses(case)]
    return [*fitting, *claim_cases(msgspec.structs.replace(variant, role="candidate"), fitting)]
