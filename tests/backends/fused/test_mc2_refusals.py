"""Kernel "mc2" on emulated NPUs: what all ranks refuse, ranks that differ or are lost, and code with errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend import fused_linears, module
from ascend.fused_linears import GATHER, SCATTER
from ascend.hccl_ledger import limits
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from ascend.refusals import refuse
from patience import patient
from ranks import Here, RankError
from test_mc2 import BF16, called, group_of, parallel

import tokenring as tr
from tokenring.backends.control import control
from tokenring.backends.control.process_info import this_process
from tokenring.backends.fused import mc2
from tokenring.backends.fused.mc2 import Mc2
from tokenring.launch.groups import HeldGroup

# ---------- what it refuses


def layer_of(tp: tr.TensorParallel, width: int = 256, features: int = 256, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A column layer that trains, of this rank's features."""
    x, weight = (torch.ones(*shape, dtype=dtype, device="npu") for shape in ((1, 2, width), (features, width)))
    x.requires_grad_()
    weight.requires_grad_()
    return tr.column_linear(x, weight, tp)


# What is asked for, the name of the device, and what all ranks hear.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a short width": ({"width": 255}, "Ascend910B3", "its forward product sums over the width, 255, and it takes 256"),
    "few features": ({"features": 128}, "Ascend910B3", "its backward product sums over a rank's features, 128, and"),
    "a long width": ({"width": 65535}, "Ascend910B3", "its forward product sums over the width, 65535, and it takes"),
    "fp32": ({"dtype": torch.float32}, "Ascend910B3", "it takes bfloat16, and these tensors are float32"),
    "a 910A": ({}, "Ascend910A", "Ascend910A has no such operators: Atlas A2 and A3 have"),
    "an older 910B": ({}, "Ascend910B", "Ascend910B has no such operators"),
    "a 950": ({}, "Ascend950PR_9579", "Ascend950PR_9579 has no such operators"),
}


def refused(here: Here, what: str) -> str:
    asked, device_name, _ = REFUSED[what]
    with parallel(here) as tp, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "NAME", device_name)
        with pytest.raises(tr.UnsupportedError) as caught:
            layer_of(tp, **asked)
        assert not called()
        patched.undo()
        assert layer_of(tp).shape == (1, 2 * here.world_size, 256)  # the group lives on
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_take(npus: NpuPools, what: str) -> None:
    for text in npus(2)(refused, what):
        assert f"kernel 'mc2' cannot take this column layer: {REFUSED[what][2]}" in text
        assert "leave TensorParallel(kernel='auto'), which runs a schedule" in text


def tokens_that_stay(here: Here) -> str:
    """Return what a row layer says of h as it lies where tokens stay: [B, T/P, N]."""
    h, weight = (torch.ones(*shape, dtype=BF16, device="npu") for shape in ((1, 2, 512), (256, 256)))
    with parallel(here) as tp, pytest.raises(tr.ConfigurationError) as caught:
        tr.row_linear(h, weight, tp)
    return str(caught.value)


def test_it_advises_nothing_that_it_does_not_have(npus: NpuPools) -> None:
    for text in npus(2)(tokens_that_stay):
        assert "but kernel 'mc2' has 4 and 256 on a rank" in text and "by the same kernel" in text
        assert "stays" not in text


def frozen_few_features(here: Here) -> list[str]:
    with parallel(here) as tp, torch.no_grad():
        layer_of(tp, features=128)
        return called()


def test_a_layer_that_does_not_train_needs_forward_alone(npus: NpuPools) -> None:
    assert npus(2)(frozen_few_features) == [[GATHER], [GATHER]]


def without(here: Here, offer: str, ranks: tuple[int, ...]) -> str:
    """Operators that these ranks lack."""
    with parallel(here, offer if here.rank in ranks else "wheels") as tp, pytest.raises(tr.TokenRingError) as caught:
        layer_of(tp)
    assert not called()
    return str(caught.value)


def test_a_torch_npu_without_them_on_one_rank(npus: NpuPools) -> None:
    own, heard = npus(2)(without, "nothing", (0,))
    assert f"this torch_npu has no {GATHER}" in own or f"this torch_npu has no {SCATTER}" in own
    assert heard.startswith("rank 0 refused: kernel 'mc2' cannot take this column layer: this torch_npu has no")


def on_the_host(here: Here) -> str:
    with parallel(here) as tp, pytest.raises(tr.UnsupportedError) as caught:
        tr.column_linear(torch.ones(1, 2, 256, dtype=BF16), torch.ones(256, 256, dtype=BF16), tp)
    return str(caught.value)


def test_tensors_on_a_cpu(npus: NpuPools) -> None:
    assert all("its operators are those of NPUs, and these tensors are on cpu" in x for x in npus(2)(on_the_host))


def on_another_npu(here: Here) -> str:
    """Rank 1 has its tensors on another NPU than its current one."""
    place = f"npu:{2 * here.rank}"
    x, weight = (torch.ones(*shape, dtype=BF16, device=place) for shape in ((1, 2, 256), (256, 256)))
    with parallel(here) as tp, pytest.raises(tr.TokenRingError) as caught:
        tr.column_linear(x, weight, tp)
    assert not called()
    return str(caught.value)


def test_tensors_on_another_npu_than_the_current_one(npus: NpuPools) -> None:
    """HCCL makes the communicator that the operator is told for the current device."""
    says = "these tensors are on npu:2, and the communicator is that of the current device, npu:1: call torch.npu.set_"
    heard, own = npus(2)(on_another_npu)
    assert says in own and says in heard and heard.startswith("rank 1 refused: ")


def on_other_machines(here: Here, name: str) -> str:
    """Each rank takes the other for one of another machine; what it says, or nothing where it computes."""
    with parallel(here, transport="hccl") as tp, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "NAME", name)
        patched.setattr(control, "this_process", lambda: replace(this_process(), boot_id=f"machine {here.rank}"))
        try:
            layer_of(tp)
        except tr.UnsupportedError as error:
            assert not called()
            return str(error)
        return ""


def test_ranks_on_several_machines(npus: NpuPools) -> None:
    """Links of A2 that join each with each are within a machine; those of A3 go further."""
    says = "kernel 'mc2' takes ranks on Ascend910B3 that HCCS joins, each with each, and these are on 2 machines"
    assert all(says in text for text in npus(2)(on_other_machines, "Ascend910B3"))
    assert npus(2)(on_other_machines, "Ascend910_9392") == ["", ""]


def by_another_transport(here: Here) -> str:
    with parallel(here, transport="gloo") as tp, pytest.raises(tr.TokenRingError) as caught:
        layer_of(tp)
    assert not called()
    return str(caught.value)


def test_a_transport_without_hccl(npus: NpuPools) -> None:
    for text in npus(2)(by_another_transport):
        assert "kernel 'mc2' works beside a transport of HCCL" in text and "this is 'GlooTransport'" in text


def three(here: Here) -> str:
    with parallel(here) as tp, pytest.raises(tr.UnsupportedError) as caught:
        layer_of(tp)
    return str(caught.value)


def test_three_ranks(npus: NpuPools) -> None:
    assert all("it takes 2, 4 or 8 ranks on Ascend910B3, and here are 3" in text for text in npus(3)(three))


def over_gloo(here: Here) -> str:
    fresh()
    fused_linears.install()
    with tr.TensorParallel(kernel="mc2", transport="hccl") as tp, pytest.raises(tr.UnsupportedError) as caught:
        layer_of(tp)
    return str(caught.value)


def test_a_group_without_hccl(npus: NpuPools) -> None:
    assert all("kernel 'mc2' cannot take this column layer: its group has " in text for text in npus(2)(over_gloo))


def other_group(here: Here) -> str:
    with parallel(here) as tp:
        layer_of(tp)
        with tr.TensorParallel(group_of(here), kernel="mc2") as same:
            layer_of(same)
        with tr.TensorParallel(group_of(here, "another"), kernel="mc2") as other:
            with pytest.raises(tr.UnsupportedError) as caught:
                layer_of(other)
            tp.close()
            fused_linears.domains.clear()  # what the vendor's rule is about is a model: this is another one
            layer_of(other)
    return str(caught.value)


def test_one_communication_domain_on_a2(npus: NpuPools) -> None:
    says = "all fused operators of a model have to be in one communication domain, and another TensorParallel"
    assert all(says in text for text in npus(2)(other_group))


# ---------- ranks that differ, and that are lost


def differing(here: Here, how: str) -> str:
    options = {"kernel": "auto", "schedule": "direct-q"} if how == "kernel" and here.rank else {}
    with parallel(here, **options) as tp, pytest.raises(tr.ConfigurationError) as caught:
        layer_of(tp, features=512 if how == "shape" and here.rank else 256)
    assert not called()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [("kernel", "kernel: rank 0: mc2; rank 1: auto"), ("shape", "weight: rank 0: [256, 256]; rank 1: [512, 256]")],
)
def test_ranks_that_differ(npus: NpuPools, how: str, says: str) -> None:
    assert all(says in text for text in npus(2)(differing, how))


def fails(here: Here) -> tuple[int | None, str]:
    """The operator raises on rank 1, when rank 0 is in it."""
    with pytest.raises(tr.PeerLost) as caught, parallel(here) as tp, pytest.MonkeyPatch.context() as patched:
        limits.execute = patient(2.0)
        if here.rank:
            patched.setattr(fused_linears, "_group", lambda hcom, ranks: refuse(True, "EZ9999: Inner Error!"))
        layer_of(tp)
    return caught.value.rank, str(caught.value)


def test_an_operator_that_fails_names_its_rank(npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        (rank, _), (own, text) = some(fails)
    assert (rank, own) == (1, 1) and "ran the forward pass of a column layer by kernel 'mc2'" in text


def goes(here: Here) -> None:
    """Rank 1 is gone before the second layer."""
    with parallel(here, timeout_seconds=patient(5.0)) as tp:
        layer_of(tp)
        if here.rank:
            os._exit(0)
        try:
            layer_of(tp)
        finally:
            assert len(called()) == 1  # no operator was begun that nobody would join


def test_a_rank_that_is_gone_is_named_before_an_operator_begins(npus: NpuPools) -> None:
    with npus.expendable(2) as some, pytest.raises(RankError) as caught:
        some(goes)
    text = str(caught.value)
    assert "rank 1: died with exit code 0" in text
    assert re.search(r"PeerLost: rank 1 of 2 is lost: its process \(pid \d+ on .+?\) is gone", text), text
    assert "AssertionError" not in text


# ---------- code that falls into it


def fallen(here: Here, mutant: str) -> str:
    """Return what the emulation says of code with something wrong in it."""
    with pytest.raises(tr.PeerLost) as caught, parallel(here) as tp, pytest.MonkeyPatch.context() as patched:
        limits.execute = limits.connect = patient(2.0)
        MUTANTS[mutant][0](patched)
        out = layer_of(tp)
        torch.autograd.backward(out, torch.ones_like(out))
    return str(caught.value)


def name_of_another(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Mc2, "_communicator_of", lambda self, transport: "group_name_1")


def rank_of_the_group(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(HeldGroup, "global_ranks", lambda self: [1, 0])


def ranks_of_the_world(patched: pytest.MonkeyPatch) -> None:
    multiplied = mc2.WholeLayer._multiplied

    def doubled(self: Any, *given: Any) -> Any:
        patched.setattr(self._kernel, "ranks", 4)
        return multiplied(self, *given)

    patched.setattr(mc2.WholeLayer, "_multiplied", doubled)


def strides_as_they_come(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(mc2, "_plain", lambda right: torch.stack((right, right), 2)[..., 0])


def transposed_rows(patched: pytest.MonkeyPatch) -> None:
    contiguous = torch.Tensor.contiguous
    patched.setattr(torch.Tensor, "contiguous", lambda self: contiguous(self.t()).t() if self.dim() == 2 else self)


def rows_beside(patched: pytest.MonkeyPatch) -> None:
    """The gathering is begun before dx and waited for behind it, in the communicator of both."""
    backward = mc2.WholeLayer._column_backward

    def beside(self: Any, own: dict[str, torch.Tensor]) -> None:
        rows = own["x"][0, :, 0]
        whole = rows.new_empty(self._kernel.ranks * rows.shape[0], rows.shape[1])
        self.under_way = self._kernel._group().all_gather_single(whole, rows)
        backward(self, own)

    patched.setattr(mc2.WholeLayer, "_column_backward", beside)


def with_a_turn(patched: pytest.MonkeyPatch) -> None:
    operator = mc2._operator

    class Turned:
        def __init__(self, name: str) -> None:
            self._name = name

        def default(self, *given: Any, **more: Any) -> Any:
            return operator(self._name).default(*given, **more, comm_turn=1)

    patched.setattr(mc2, "_operator", Turned)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the name of another": (name_of_another, "no communicator is called 'group_name_1'"),
    "the rank of another": (rank_of_the_group, "is not equal indexFromCurDevice"),
    "ranks of the world": (ranks_of_the_world, "world_size is 4, communicator "),
    "strides as they come": (strides_as_they_come, "x2 must be contiguous when not transposed"),
    "transposed rows": (transposed_rows, "x1 must not be transposed"),
    "rows beside dx": (rows_beside, "begins in communicator "),
    "a turn": (with_a_turn, "comm_turn: only 0 is supported"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(npus: NpuPools, mutant: str) -> None:
    with npus.expendable(2) as some:
        assert any(MUTANTS[mutant][1] in text for text in some(fallen, mutant))
