"""The signatures of the attention operators, by wheel of torch_npu and by branch of op-plugin.

Written out by hand from what the wheels hold; test_ascend_schemas compares them with the extracts, where those
are at hand. The wheels on PyPI agree on all operators but one. The branches lack arguments that came later: 7.2.0
has softmax_layout, 7.3.0 sink, 26.0.0 a given dropout mask.
"""

from __future__ import annotations

FOREVER = 2147483647
_MASKS = ["Tensor? pse=None", "Tensor? padding_mask=None", "Tensor? atten_mask=None"]
_ROPE = ["Tensor? query_rope=None", "Tensor? key_rope=None"]
_STATISTICS = [
    "Tensor? softmax_max=None", "Tensor? softmax_sum=None", "Tensor? softmax_in=None", "Tensor? attention_in=None",
]  # fmt: skip
_LENGTHS = ["int[]? prefix=None", "int[]? actual_seq_qlen=None", "int[]? actual_seq_kvlen=None", "int sparse_mode=0"]
_PARALLEL = ["bool gen_mask_parallel=True", "bool sync=False"]
_STARTS = ["int pse_type=1", "int[]? q_start_idx=None", "int[]? kv_start_idx=None"]
_LATER = ['str softmax_layout=""', "Tensor? sink=None"]
_DROPOUT = ["Tensor? dropout_mask=None", "int seed=0", "int offset=0"]
_OPERANDS = ["Tensor query", "Tensor key", "Tensor value"]
_HOW = ["int head_num", "str input_layout"]
_COUNTERS = ["int seed=0", "int offset=0", "int numels=0"]


def _numbers(scale: str, tokens: str) -> list[str]:
    """tokens: "tockens" in the first version, "tokens" in the second."""
    return [
        f"float {scale}=1.", "float keep_prob=1.", f"int pre_{tokens}={FOREVER}", f"int next_{tokens}={FOREVER}",
        "int inner_precise=0",
    ]  # fmt: skip


def _text(name: str, arguments: list[str], returns: str) -> str:
    return f"{name}({', '.join(arguments)}) -> ({returns})"


_FORWARD_RETURNS = "Tensor, Tensor, Tensor, Tensor, int, int, int"
_FORWARD = [*_OPERANDS, *_HOW, *_MASKS, *_numbers("scale", "tockens"), *_LENGTHS, *_PARALLEL, *_LATER, *_DROPOUT]
_FORWARD_2 = [
    *_OPERANDS, *_HOW, "*", *_MASKS, *_ROPE, *_numbers("scale", "tokens"), *_LENGTHS, *_PARALLEL, *_STARTS, *_LATER,
    *_DROPOUT,
]  # fmt: skip
_GRAD = [
    *_OPERANDS, "Tensor dy", *_HOW, "*", *_MASKS, *_STATISTICS, *_numbers("scale_value", "tockens"), *_COUNTERS,
    *_LENGTHS, *_PARALLEL, *_LATER,
]  # fmt: skip
_GRAD_2 = [
    *_OPERANDS, "Tensor dy", *_HOW, "*", *_MASKS, *_STATISTICS, *_ROPE, *_numbers("scale_value", "tokens"),
    *_COUNTERS, *_LENGTHS, *_PARALLEL, *_STARTS, *_LATER,
]  # fmt: skip
_UPDATE = ["Tensor[] lse", "Tensor[] local_out", "int update_type"]
_RING = [
    "Tensor prev_attn_out", "Tensor prev_softmax_max", "Tensor prev_softmax_sum", "Tensor cur_attn_out",
    "Tensor cur_softmax_max", "Tensor cur_softmax_sum", "*", "Tensor? actual_seq_qlen=None",
    'str input_layout="SBH"', 'str input_softmax_layout=""',
]  # fmt: skip
CURRENT = {
    name: _text(name, arguments, returns)
    for name, arguments, returns in (
        ("npu_fusion_attention", _FORWARD, _FORWARD_RETURNS),
        ("npu_fusion_attention_grad", _GRAD, ", ".join(["Tensor"] * 5)),
        ("npu_fusion_attention_v2", _FORWARD_2, _FORWARD_RETURNS),
        ("npu_fusion_attention_grad_v2", _GRAD_2, ", ".join(["Tensor"] * 7)),
        ("npu_attention_update", _UPDATE, "Tensor, Tensor"),
        ("npu_ring_attention_update", _RING, "Tensor, Tensor, Tensor"),
    )
}
RING = "npu_ring_attention_update"
WHEELS: dict[str, dict[str, str]] = {
    "2.7.1.post11": CURRENT,
    "2.9.1": {name: text for name, text in CURRENT.items() if name != RING},
    "2.13.0": CURRENT,
    "2.14.0": CURRENT,
}


def _without(arguments: list[str]) -> dict[str, str]:
    """The operators before they had these arguments; the gradient of a sink that they lack is not returned."""
    made = {}
    for name, text in CURRENT.items():
        if name == RING:
            continue
        for argument in arguments:
            text = text.replace(f", {argument}", "") if "_grad" not in name or argument not in _DROPOUT else text
        if "Tensor? sink=None" in arguments and "_grad" in name:
            text = text.replace("-> (Tensor, ", "-> (")
        made[name] = text
    return made


BRANCHES: dict[str, dict[str, str]] = {
    "op-plugin 7.1.0": _without([*_LATER, *_DROPOUT]),
    "op-plugin 7.2.0": _without([_LATER[1], *_DROPOUT]),
    "op-plugin 7.3.0": _without(_DROPOUT),
    "second version only": {name: CURRENT[name] for name in CURRENT if name.endswith(("_v2", "attention_update"))},
}
OFFERS = WHEELS | BRANCHES
