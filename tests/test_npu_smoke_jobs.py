"""ci/npu-smoke's tasks about whole jobs, shapes and refusals: on emulated NPUs each finds what is assumed, and finds
it spoilt where it is; and the script ends ranks whose messages are stuck, and starts others where settings differ.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend import device, hccl, hccl_streams
from ascend.hccl_ledger import limits
from ascend.operators import register
from ascend.ranks import NpuPools
from ranks import Here

from tokenring.backends.devices import Memory
from tokenring.backends.kernels.npu_fusion import NpuFusion

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci"))

from npu_smoke import costs, kernel, operators, rank, shapes, tasks, team, traffic, training
from npu_smoke import here as smoke
from npu_smoke.links import in_one_order
from npu_smoke.unknowns import AS_ASSUMED, MEASURED, OPEN, OTHERWISE, UNKNOWNS, verdict

pytestmark = pytest.mark.timeout(600)  # ranks of their own, on a machine that is busy
Spoil = Callable[[pytest.MonkeyPatch], None]
MODULES = (operators, kernel, shapes, traffic, costs, training)


def words(task: str, result: dict[str, Any], real: bool = True) -> dict[str, str]:
    """The verdicts that a task's result leads to."""
    told = {task: {"status": "done", "result": result}}
    return {each.key: verdict(each, told, real).word for each in UNKNOWNS if each.task == task}


def found_by(here: Here, task: str, spoil: Spoil | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What the task comes back with on this rank, and the verdicts of that."""
    register("2.13.0")
    hccl.install()
    place = smoke.Here(here.rank, here.world_size, "npu", True, lambda text: None)
    module = next(each for each in MODULES if task in vars(each))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shapes, "DRY_LONG", 96)
        patched.setattr(limits, "execute", 60.0 if spoil is None else 5.0)
        patched.setattr(limits, "connect", 60.0)
        if spoil is not None:
            spoil(patched)
        result = getattr(module, task)(place)
    return result, words(task, result)


def run(npus: NpuPools, ranks: int, task: str, spoil: Spoil | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Of rank 0, on ranks that nobody else gets."""
    with npus.expendable(ranks) as some:
        found: list[tuple[dict[str, Any], dict[str, str]]] = some(found_by, task, spoil)
    return found[0]


# ---------- messages


def in_one_queue(patched: pytest.MonkeyPatch) -> None:
    """All communicators of a rank share a stream, and its messages are posted in an order of its own."""
    patched.setattr(limits, "streams", 1)
    hccl_streams.forget_streams()
    order = in_one_order
    patched.setattr(traffic, "in_one_order", lambda ranks: order(ranks)[:: -1 if is_odd_rank() else 1])


def is_odd_rank() -> bool:
    import torch.distributed as dist

    return bool(dist.get_rank() % 2)


def one_stream(patched: pytest.MonkeyPatch) -> None:
    """As where HCCL's streams come from a pool: a receive of others then stands before the transport's messages."""
    patched.setattr(limits, "streams", 1)
    hccl_streams.forget_streams()


def brings_others(patched: pytest.MonkeyPatch) -> None:
    """Receives see other bytes."""
    given = traffic._mark
    patched.setattr(traffic, "_mark", lambda number: given(number) + is_odd_rank())


@pytest.mark.parametrize("task", ["receives", "retried"])
def test_many_receives(npus: NpuPools, task: str) -> None:
    """Those of four lanes, four deep, to two peers; with retry on they are a matter of A3."""
    result, found = run(npus, 3, task)
    assert (result["messages"], result["communicators"]) == (2 * 2 * 2 * traffic.DEEP, 8)
    assert (result["stuck"], result["wrong"]) == (False, 0)
    assert list(found.values()) == [AS_ASSUMED if task == "receives" else OPEN]
    assert words("retried", {**result, "device": "Ascend910_9392"}) == {"many-receives-retry": AS_ASSUMED}


@pytest.mark.parametrize("spoil", [in_one_queue, brings_others])
def test_messages_that_are_stuck_or_wrong(npus: NpuPools, spoil: Spoil) -> None:
    result, found = run(npus, 2, "receives", spoil)
    assert found == {"many-receives": OTHERWISE}
    assert result["stuck"] is bool(result.get("ends")) is (spoil is in_one_queue)
    assert words("retried", {**result, "device": "Ascend910_9392"}) == {"many-receives-retry": OTHERWISE}


def test_lanes_beside_others(npus: NpuPools) -> None:
    result, found = run(npus, 3, "lanes")
    assert found["lanes-beside-others"] == AS_ASSUMED and not result["stuck"]
    assert words("lanes", {**result, "alone": 1.0, "beside": 1.1})["lanes-time"] == AS_ASSUMED
    assert words("lanes", {**result, "alone": 1.0, "beside": 2.0})["lanes-time"] == OTHERWISE


def test_lanes_that_are_stuck_behind_others(npus: NpuPools) -> None:
    result, found = run(npus, 2, "lanes", one_stream)
    assert found["lanes-beside-others"] == OTHERWISE and result["ends"]


def test_others_that_get_something_else(npus: NpuPools) -> None:
    result, found = run(npus, 2, "lanes", others_are_wrong)
    assert found["lanes-beside-others"] == OTHERWISE and result["wrong"] == 2


def others_are_wrong(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(traffic.Others, "wrong", lambda self: 1)


def small_memory(patched: pytest.MonkeyPatch) -> None:
    told = iter([Memory(0, each, 1 << 40) for each in (10 << 30, 3 << 30, 3 << 30)])
    patched.setattr(smoke.Here, "device", property(lambda self: Telling(told)))


def right_memory(patched: pytest.MonkeyPatch) -> None:
    told = iter([Memory(0, each, 1 << 40) for each in (10 << 30, (10 << 30) - 8 * (40 << 20), 10 << 30)])
    patched.setattr(smoke.Here, "device", property(lambda self: Telling(told)))


class Telling:
    """A device with so much free memory, look by look."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def memory(self) -> Memory:
        return next(self._told)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Nothing is late."""


def test_a_preparation(npus: NpuPools) -> None:
    """Of all communicators; memory as reckoned and given back, or not."""
    result, found = run(npus, 3, "prepared", right_memory)
    assert (result["communicators"], result["assumed bytes"]) == (8, 8 * (40 << 20))
    assert found == {"prepare-time": AS_ASSUMED, "prepare-memory": AS_ASSUMED}
    assert words("prepared", {**result, "seconds": 100.0})["prepare-time"] == OTHERWISE
    assert words("prepared", {**result, "bytes": None})["prepare-memory"] == OPEN
    _, found = run(npus, 3, "prepared", small_memory)
    assert found["prepare-memory"] == OTHERWISE
    kept = {**result, "given back": 0}
    assert words("prepared", kept)["prepare-memory"] == OTHERWISE


# ---------- costs


def slow_host(patched: pytest.MonkeyPatch) -> None:
    """Each operation takes a millisecond of the host, and each message."""
    given, message = device._run, smoke.Here.message

    def late(func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "aten::add_":
            time.sleep(0.001)
        return given(func, args, kwargs)

    def late_message(self: Any, *args: Any) -> Any:
        time.sleep(0.001)
        return message(self, *args)

    patched.setattr(device, "_run", late)
    patched.setattr(smoke.Here, "message", late_message)


def test_launches(npus: NpuPools) -> None:
    """A slow host is found out; whether this one is fast is no matter of tests."""
    result, found = run(npus, 2, "launches", slow_host)
    assert found == {"launch-costs": OTHERWISE}
    assert result["host us"] >= 1000 and result["post us"] >= 1000 and result["device us"] > 0
    fast = {"host us": 8.0, "device us": 3.0, "post us": 40.0}
    assert words("launches", fast) == {"launch-costs": AS_ASSUMED}
    assert words("launches", {**fast, "post us": 200.0}) == {"launch-costs": OTHERWISE}
    assert words("launches", {**fast, "post us": None}) == {"launch-costs": AS_ASSUMED}


def cuts_off(patched: pytest.MonkeyPatch) -> None:
    """What is behind the first buffer of a message is not there."""
    given = smoke.Here.message

    def cut(self: Any, data: torch.Tensor, peer: int, sends: bool, group: str) -> Any:
        if sends and data.numel() > costs.CHUNK_BYTES:
            data = data.clone()
            data[costs.CHUNK_BYTES :] = 0
        return given(self, data, peer, sends, group)

    patched.setattr(smoke.Here, "message", cut)


@pytest.mark.parametrize("task", ["curve", "curve64", "curve128"])
def test_a_curve(npus: NpuPools, task: str) -> None:
    """Of each size, and every byte about the size of the buffer."""
    result, found = run(npus, 2, task)
    assert [int(size) for size in result["seconds"]] == list(costs.DRY_SIZES) and result["wrong"] == []
    if task == "curve":
        assert (found["message-curve"], found["chunks"]) == (MEASURED, AS_ASSUMED)
    key = {"curve": "chunking", "curve64": "chunking-64", "curve128": "chunking-128"}[task]
    for seconds, word in ((1e-3, AS_ASSUMED), (3e-3, OTHERWISE)):
        told = {"seconds": {str(16 << 20): 0.5e-3, str(32 << 20): seconds}, "chunk bytes": 20 << 20}
        assert words(task, told | {"tried": 4, "wrong": []})[key] == word
    few = {"seconds": {str(4 << 10): 1e-5}, "chunk bytes": 20 << 20, "tried": 4, "wrong": []}
    assert words(task, few)[key] == OPEN


def test_a_message_that_is_cut_off(npus: NpuPools) -> None:
    result, found = run(npus, 2, "curve", cuts_off)
    assert result["wrong"] == [costs.CHUNK_BYTES + 1, 2 * costs.CHUNK_BYTES + 1] and found["chunks"] == OTHERWISE


# ---------- merging, shapes, refusals


def no_infinities(patched: pytest.MonkeyPatch) -> None:
    """log(exp(a) + exp(b)) as m + log(1 + exp(-|a - b|)), without a guard: CANN's document of aclnnLogAddExp."""

    def bare(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs())))

    patched.setattr(torch, "logaddexp", bare_or_given(bare))


def bare_or_given(bare: Any) -> Any:
    """On the device alone: what is right is computed on the CPU."""
    given = torch.logaddexp
    return lambda a, b, out=None: given(a, b) if out is None else bare(a, b, out=out)


def overflows(patched: pytest.MonkeyPatch) -> None:
    """log(exp(a) + exp(b)), written so: beyond 88 exp gives infinity."""
    patched.setattr(torch, "logaddexp", bare_or_given(lambda a, b, out: out.copy_(torch.log(a.exp() + b.exp()))))


def is_dense(patched: pytest.MonkeyPatch) -> None:
    """lerp_ into a view with gaps writes where it should not: rows one after another."""
    given = torch.Tensor.lerp_

    def dense(self: torch.Tensor, *args: Any) -> torch.Tensor:
        return given(self, *args) if self.is_contiguous() else self

    patched.setattr(torch.Tensor, "lerp_", dense)


@pytest.mark.parametrize("spoil", [None, no_infinities, overflows, is_dense])
def test_torchs_own_merge(npus: NpuPools, spoil: Spoil | None) -> None:
    result, found = run(npus, 1, "torchmerge", spoil)
    assert found == {"torch-merge": AS_ASSUMED if spoil is None else OTHERWISE}
    cases = " ".join(result["wrong"])
    if spoil is no_infinities:
        assert "lse (-inf, -inf)" in cases and "(0.5, 1.5)" not in cases
    if spoil is overflows:
        assert "lse (200.0, 199.0)" in cases
    if spoil is is_dense:
        assert "records" in cases and "whole" not in cases


def wide_heads(patched: pytest.MonkeyPatch) -> None:
    """Right up to head dim 128."""
    given = NpuFusion.forward

    def forward(self: Any, q: torch.Tensor, *rest: Any, **how: Any) -> Any:
        out, lse = given(self, q, *rest, **how)
        return (out * 1.1 if q.shape[-1] > 128 else out), lse

    patched.setattr(NpuFusion, "forward", forward)


def refuses_many_heads(patched: pytest.MonkeyPatch) -> None:
    given = NpuFusion.backward

    def backward(self: Any, dout: torch.Tensor, q: torch.Tensor, *rest: Any, **how: Any) -> Any:
        if q.shape[1] == 64:
            raise RuntimeError("ERR01001 OPS invalid parameter: head_num")
        return given(self, dout, q, *rest, **how)

    patched.setattr(NpuFusion, "backward", backward)


@pytest.mark.parametrize("spoil", [None, wide_heads, refuses_many_heads])
def test_shapes(npus: NpuPools, spoil: Spoil | None) -> None:
    """One that raises is named, and all others have their errors."""
    result, found = run(npus, 1, "shapes", partial(small_shapes, then=spoil))
    assert found == {"kernel-shapes": AS_ASSUMED if spoil is None else OTHERWISE}
    names = {case.rpartition(",")[0] for case in result["errors"]}
    wanted = {*shapes.SHAPES, "96 tokens"}
    if spoil is wide_heads:
        wrong = {each.split(" of ")[1].split(",")[0] for each in result["wrong"]}
        assert wrong == {"D 192", "D 256"} and names == wanted
    if spoil is refuses_many_heads:
        assert names == wanted - {"64 heads, 8 for k and v"}
        assert len(result["wrong"]) == 2 and all("RuntimeError: ERR01001" in each for each in result["wrong"])


def small_shapes(patched: pytest.MonkeyPatch, then: Spoil | None) -> None:
    """As many heads and as large, with fewer tokens: no multiple of 16 stays one."""
    few = {name: each._replace(tokens=21 if each.tokens % 16 else 16) for name, each in shapes.SHAPES.items()}
    patched.setattr(shapes, "SHAPES", few)
    if then is not None:
        then(patched)


def lacking(direction: str, patched: pytest.MonkeyPatch) -> None:
    """A CANN without the kernel for softmax_layout in one direction, under a torch_npu whose schema has it.

    As op-plugin says it: TORCH_CHECK(softmax_layout_str == "", ...) where check_aclnn_kernel_available denies
    (FlashAttentionKernelNpuOpApi.cpp of 517f2e7d, 899-914 forward, 575-589 and 1175-1189 the gradient).
    """
    name = f"npu::npu_fusion_attention{direction}"
    given = device.operators[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("softmax_layout") or args.count("TND") > 1:  # one is how q, k and v lie
            raise RuntimeError("The param softmax_layout is not supported\n[ERROR] ERR01001 OPS invalid parameter")
        return given(*args, **kwargs)

    patched.setitem(device.operators, name, call)


PACKED = {"packed-order": AS_ASSUMED, "packed-order-tnd": AS_ASSUMED,
          "packed-gradient": AS_ASSUMED, "packed-gradient-tnd": AS_ASSUMED}  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (None, None), (partial(lacking, ""), "packed-order-tnd"), (partial(lacking, "_grad"), "packed-gradient-tnd"),
    ],
)  # fmt: skip
def test_both_orders_of_packed_statistics(npus: NpuPools, spoil: Spoil | None, lost: str | None) -> None:
    """Forward and gradient, each by itself: what is refused loses no other verdict."""
    result, found = run(npus, 1, "packed", spoil)
    assert found == (PACKED if lost is None else {**PACKED, lost: OTHERWISE})
    if lost is not None:
        seen = result["order" if "order" in lost else "gradient"]
        assert seen["TND"].startswith("refused: The param softmax_layout is not supported")


def other_statistics(patched: pytest.MonkeyPatch) -> None:
    """The gradient reads packed statistics in the other order."""
    given = operators._Packed._as_asked
    patched.setattr(operators._Packed, "_as_asked", lambda self, x, layout: given(self, x, "" if layout else "TND"))


def test_a_gradient_that_reads_another_order(npus: NpuPools) -> None:
    _, found = run(npus, 1, "packed", other_statistics)
    assert found == {**PACKED, "packed-gradient": OTHERWISE, "packed-gradient-tnd": OTHERWISE}


# ---------- MindSpeed

# Lines as Megatron's training_log prints them (megatron/training/training.py: "lm loss: {:.6E} |"), on the last rank.
PRETRAIN = """
import os, sys
ranks = int(os.environ["WORLD_SIZE"])
flags = sys.argv[1:]
assert flags[flags.index("--context-parallel-size") + 1] == str(ranks), flags
assert ("tokenring" in flags) is (ranks > 1) and os.environ["MASTER_PORT"]
assert os.path.isfile(os.path.join(os.environ["PYTHONPATH"].split(os.pathsep)[0], "pretrain_gpt.py"))
BROKEN
if int(os.environ["RANK"]) == ranks - 1:
    for step, loss in ((1, 6.25), (2, 5.5 + SPOILT * (ranks > 1))):
        print(f" iteration {step:8d}/{2:8d} | consumed samples: {step:12d} | elapsed time per iteration (ms): 99.0 | "
              f"learning rate: 1.000000E-03 | global batch size: 1 | lm loss: {loss:.6E} | loss scale: 1.0 |")
"""


def with_mindspeed(folder: str, spoilt: float, broken: str, patched: pytest.MonkeyPatch) -> None:
    """A stand-in that takes MindSpeed's place, its job's too."""
    made = Path(folder)
    text = PRETRAIN.replace("SPOILT", str(spoilt)).replace("BROKEN", broken)
    script = made / f"job{spoilt}{len(broken)}.py"
    script.write_text(text, encoding="utf-8")
    (made / "pretrain_gpt.py").touch()
    patched.setenv("MEGATRON", folder)
    patched.setattr(training, "SCRIPT", script)
    find = importlib.util.find_spec
    patched.setattr(importlib.util, "find_spec", lambda name: find("json" if name == "mindspeed" else name))


@pytest.mark.parametrize(
    ("spoilt", "broken", "word"),
    [
        (0.0, "", AS_ASSUMED), (0.001, "", AS_ASSUMED), (0.5, "", OTHERWISE),
        (0.0, "assert ranks == 1, 'tokenring refuses'", OTHERWISE), (0.0, "sys.exit(0)", OPEN),
    ],
)  # fmt: skip
def test_a_step_of_mindspeed(npus: NpuPools, tmp_path: Path, spoilt: float, broken: str, word: str) -> None:
    result, found = run(npus, 2, "mindspeed", partial(with_mindspeed, str(tmp_path), spoilt, broken))
    assert found == {"mindspeed-loss": word}
    if not broken:
        assert result == {"alone": [6.25, 5.5], "split": [6.25, 5.5 + spoilt]}
    if "refuses" in broken:
        assert "tokenring refuses" in result["failed"]


def test_mindspeed_that_does_not_run_by_itself_settles_nothing(npus: NpuPools, tmp_path: Path) -> None:
    from ranks import RankError

    spoil = partial(with_mindspeed, str(tmp_path), 0.0, "raise ImportError('libhccl.so')")
    says = r"without context parallelism pretrain_gpt.*libhccl"
    with npus.expendable(2) as some, pytest.raises(RankError, match=says):
        some(found_by, "mindspeed", spoil)


@pytest.mark.parametrize("has", [True, False])
def test_without_mindspeed_it_is_left_out(has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if has else None)
    monkeypatch.delenv("MEGATRON", raising=False)
    result = training.mindspeed(smoke.Here(0, 2, "npu", False, lambda text: None))
    assert ("MEGATRON names no folder" if has else "MindSpeed is not installed") in result["left out"]
    assert words("mindspeed", result) == {"mindspeed-loss": OPEN}


def test_its_flags_are_megatrons() -> None:
    """Those that the test of MindSpeed's own parsers gives it, but for sizes and what is of NPUs."""
    from test_mindspeed_real import FLAGS

    known = {flag for flag in FLAGS if flag.startswith("--")}
    more = {"--min-lr", "--seed", "--log-interval", "--eval-iters", "--bf16", "--use-flash-attn"}
    more.add("--attention-mask-type")
    assert {flag for flag in training.FLAGS if flag.startswith("--")} <= known | more


# ---------- none stops the others


@pytest.mark.parametrize("task", [*tasks.LINKS, *tasks.OPERATORS, *tasks.KERNEL, *tasks.JOBS])
def test_on_one_rank_of_a_cpu_every_task_comes_to_its_end(task: str, ranks: Any) -> None:
    """Or says why it is left out; each is found by its name."""
    (result,) = ranks(1)(on_a_cpu, task)
    assert isinstance(result, dict)
    assert set(words(task, result, real=False).values()) <= {OPEN, AS_ASSUMED, MEASURED}


def on_a_cpu(here: Here, task: str) -> Any:
    return rank._do(smoke.Here(0, 1, "cpu", False, lambda text: None), task)


def test_settings_have_processes_of_their_own() -> None:
    """In order, and no more starts than there are changes."""
    asked = team.Asked("npu", 2, None, 0.0, settings=tasks.SETTINGS)
    left, starts = ["rows", "tile", "retried", "curve64", "curve64", "wait"], []
    while left:
        starts.append(asked.together(left))
        left = left[len(starts[-1]) :]
    assert starts == [["rows", "tile"], ["retried"], ["curve64", "curve64"], ["wait"]]
    assert team.Asked("cpu", 2, None, 0.0).together(["rows", "retried", "wait"]) == ["rows", "retried", "wait"]
    assert (asked.limit_seconds("rows"), asked.limit_seconds("mindspeed")) == (120.0, 360.0)
    assert set(tasks.SETTINGS) | set(tasks.TIMES_AS_LONG) <= {*tasks.JOBS, *tasks.KERNEL}


STUCK = """
import os, sys
from npu_smoke import links, rank
def rows(here):
    return {"seen": os.environ.get("SEEN")}
def wait(here):
    return {"stuck": True, "ends": True, "process": os.getpid()}
links.rows, links.wait = rows, wait
rank.main(sys.argv[1])
"""


def test_stuck_messages_end_their_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found is kept, and the other tasks get ranks of their own, with the settings of each."""
    script, shell = tmp_path / "rank.py", tmp_path / "python"
    script.write_text(STUCK)
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$3"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    settings = {"rows": {"SEEN": "by rows"}}
    asked = team.Asked("cpu", 2, None, time.monotonic() + 3600, settings=settings)
    told: list[tuple[str, dict[str, Any]]] = []
    team.run(asked, ["wait", "rows", "wait", "memory", "rows"], lambda task, found: told.append((task, found)))
    assert [(task, found["status"]) for task, found in told] == [
        ("wait", "done"), ("rows", "done"), ("wait", "done"), ("memory", "done"), ("rows", "done"),
    ]  # fmt: skip
    assert told[1][1]["result"] == told[4][1]["result"] == {"seen": "by rows"}
    assert told[0][1]["result"]["process"] != told[2][1]["result"]["process"]
