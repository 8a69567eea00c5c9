"""What is unknown of Ascend until it has run there: the question, what tokenring assumes, and a verdict from a task.

docs/ascend.md shows this table; a test compares. `PYTHONPATH=ci python -m npu_smoke.unknowns` prints it.
"""

from __future__ import annotations

from collections.abc import Callable

from npu_smoke.unknowns_of_jobs import OF_JOBS
from npu_smoke.unknowns_of_layers import OF_LAYERS
from npu_smoke.verdicts import AS_ASSUMED, CLOSE, MEASURED, OPEN, OTHERWISE, Found, Unknown, Verdict, verdict, yes

__all__ = ["AS_ASSUMED", "MEASURED", "OPEN", "OTHERWISE", "UNKNOWNS", "page", "verdict"]

SERIAL, AT_ONCE = 1.6, 1.3  # times what one takes: from here on one after another, up to here at once
ENOUGH = 0.75  # of what all links together would carry


def _serial(found: Found, both: str, wanted: bool) -> Verdict:
    """Whether both directions take as long as one after another."""
    times = found[both]["seconds"] / found["one way"]["seconds"]
    text = f"both directions take {times:.2f} × what one takes"
    if AT_ONCE < times < SERIAL:
        return Verdict(OPEN, f"{text}: neither one after another nor at once")
    return yes((times >= SERIAL) is wanted, text)


def _width(found: Found) -> Verdict:
    return Verdict(
        MEASURED,
        f"{found['one way']['gbs']:.3g} GB/s one way, {found['both, two groups']['gbs']:.3g} each way at once, "
        f"ranks 0 and 1, messages of {found['bytes']} bytes on {found['device']}",
    )


def _dies(found: Found) -> Verdict:
    if not str(found["device"]).startswith("Ascend910_93"):
        return Verdict(OPEN, f"ranks 0 and 1 are no dies of one package on {found['device']}")
    gbs = found["one way"]["gbs"]
    return yes(abs(gbs / 224 - 1) <= CLOSE, f"{gbs:.3g} GB/s one way between the dies of a package")


def _peers(found: Found) -> Verdict:
    alone, peers = found["to one"]["gbs"], found["peers"]
    if peers < 2:
        return Verdict(OPEN, "one peer only")
    share = found["to all"]["gbs"] / alone
    return yes(share >= ENOUGH * peers, f"{peers} peers at once get {share:.2f} × what one gets")


def _works(found: Found) -> Verdict:
    return Verdict(MEASURED, f"{found['operations']} operations came back as {found['works']} works")


def _ways(found: Found) -> Verdict:
    shown = ", ".join(f"{way} {each['gbs']:.3g} GB/s" for way, each in found["alone"].items())
    best = max(found["alone"], key=lambda way: found["alone"][way]["gbs"])
    return Verdict(MEASURED, f"{best} is the fastest to all peers: {shown}")


def _overlap(found: Found) -> Verdict:
    shown = ", ".join(f"{way} {each:.2f}" for way, each in found["stretch"].items())
    text = f"both together over the longer one: {shown} (1: hidden, 2: one after another)"
    return yes(max(found["stretch"].values()) <= AT_ONCE, text)


def _staging(found: Found) -> Verdict:
    text = f"{found['wrong']} of {found['rounds']} all-to-alls of lists brought something else"
    return yes(not found["wrong"], f"{text}, posted on one stream and waited for on another")


def _blocks(found: Found) -> Verdict:
    waited, delay = found["seconds in wait"], found["delay"]
    return yes(waited < delay / 2, f"the host spent {waited:.3g} s in wait for a message that came {delay:g} s late")


def _memory(found: Found) -> Verdict:
    if not found.get("bytes"):
        return Verdict(OPEN, "the device does not tell its free memory")
    wanted = found["assumed bytes"]
    text = f"{found['bytes'] / 2**20:.0f} MiB for a pair of ranks, where {wanted / 2**20:.0f} are reckoned"
    return yes(abs(found["bytes"] / wanted - 1) <= CLOSE, text)


def _contact(found: Found) -> Verdict:
    return Verdict(MEASURED, f"the first message of a pair takes {found['first contact seconds']:.3g} s")


def _rows(which: str, out: str, total: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        seen = found[which]
        text = f"out {seen['out']}, maximum {seen['largest']}, sum {seen['total']}"
        return yes(seen["out"] == out and seen["largest"] == "lowest fp32" and seen["total"] == total, text)

    return judge


def _flag(name: str, if_so: str, if_not: str) -> Callable[[Found], Verdict]:
    return lambda found: yes(bool(found[name]), if_so if found[name] else if_not)


def _order(layout: str, wanted: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        seen = found["order"].get(layout)
        if seen is None:
            return Verdict(OPEN, "this torch_npu has no such argument")
        return yes(seen == wanted, f"statistics lie {seen}")

    return judge


def _gradient(layout: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        seen = found["gradient"].get(layout)
        if seen is None:
            return Verdict(OPEN, "this torch_npu has no such argument, or no npu_fusion_attention_grad")
        return yes(seen == "right", f"dq, dk, dv: {seen}")

    return judge


def _torch_merge(found: Found) -> Verdict:
    text = f"errors up to {found['error']:.1e}"
    return yes(not found["wrong"], "; ".join([text, *found["wrong"][:4]]))


def _deterministic(found: Found) -> Verdict:
    text = f"{found['different by default']} of {found['runs']} repeated gradients differ by default"
    exact = found["different if asked"] == 0
    text += f", {found['different if asked']} with torch.use_deterministic_algorithms"
    return yes(exact, text)


def _ring_update(found: Found) -> Verdict:
    if found.get("absent"):
        return Verdict(OPEN, "this torch_npu has no npu_ring_attention_update")
    return Verdict(MEASURED, f"packed: right with {found['packed']}; negative maxima: {found['negative']}")


def _update(found: Found) -> Verdict:
    if found.get("absent"):
        return Verdict(OPEN, "this torch_npu has no npu_attention_update")
    return yes(found["error"] <= 1e-5, f"error {found['error']:.1e} in fp32")


def _kernel(found: Found) -> Verdict:
    worst = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in found["worst"].items())
    return yes(not found["wrong"], "; ".join([f"errors up to {worst}", *found["wrong"]]))


def _merging(found: Found) -> Verdict:
    times = {dtype: each["npu-update"] / each["torch"] for dtype, each in found["seconds"].items()}
    text = ", ".join(f"{share:.2f} in {dtype}" for dtype, share in times.items())
    text = f"npu_attention_update takes, of the time of torch's operators, {text}; taken: {found['taken']}"
    if found["taken"] != "npu-update":
        return Verdict(OTHERWISE, f"{text}: {found['why']}")
    return yes(max(times.values()) <= 1, text)


def _exact(found: Found) -> Verdict:
    """Every schedule: one that is wrong decides, and where some were not tried the others decide nothing."""
    worst = max(found["schedules"].items(), key=lambda item: item[1]["error"])
    text = f"{len(found['schedules'])} schedules, the worst {worst[0]} with {worst[1]['error']:.1e} in fp32"
    text += _tried(found)
    wrong = [name for name, each in found["schedules"].items() if not each["exact"]]
    text += f"; wrong: {', '.join(wrong)}" if wrong else ""
    text += f"; failed: {', '.join(found['failed'])}" if found["failed"] else ""
    exact = not wrong and not found["failed"]
    return Verdict(OPEN, text) if exact and found["untried"] else yes(exact, text)


def _times(found: Found) -> Verdict:
    timed = {name: each["seconds"] for name, each in found["schedules"].items() if each.get("seconds")}
    order = sorted(timed, key=timed.__getitem__)
    shown = ", ".join(f"{name} {1e3 * timed[name]:.3g} ms" for name in order[:4])
    return Verdict(MEASURED, f"fastest: {shown}{_tried(found)}")


def _tried(found: Found) -> str:
    """How many of the schedules there was time for, unless it was enough for all."""
    tried = len(found["schedules"]) + len(found["failed"])
    return f"; {tried} of {tried + len(found['untried'])} tried" if found["untried"] else ""


UNKNOWNS = (
    Unknown("pair-width", "how fast is one link, one way and both ways?", "28 GB/s on A2, of which 0.94 is reached",
            "pair", _width, True),
    Unknown("pair-one-group", "do both directions with a peer wait for each other in one group?", "yes",
            "pair", lambda found: _serial(found, "both, one group", True), True),
    Unknown("pair-two-groups", "do they overlap in two groups?", "yes: channels split by direction",
            "pair", lambda found: _serial(found, "both, two groups", False), True),
    Unknown("die-width", "how fast are the two dies of an A3 package joined?", "224 GB/s one way; texts also say 540",
            "pair", _dies, True),
    Unknown("all-peers", "do messages to all peers move at once?", "yes on a mesh, one link each",
            "peers", _peers, True),
    Unknown("batch-works", "how many works does batch_isend_irecv return?", "one or many: all are waited for",
            "ways", _works),
    Unknown("ways", "point to point, in a batch, or as a collective: which is fastest to all peers?",
            "point to point", "ways", _ways, True),
    Unknown("overlap", "do transfers hide behind attention?", "yes", "ways", _overlap, True),
    Unknown("staging", "is what a collective of lists copies through kept until a wait on another stream?",
            "yes, whatever MULTI_STREAM_MEMORY_REUSE is", "staging", _staging),
    Unknown("wait-blocks", "does wait block the host?", "no: the stream waits", "wait", _blocks, True),
    Unknown("pair-memory", "how much memory does a pair of ranks take in a group?", "2 × P2P_HCCL_BUFFSIZE (20 MB)",
            "memory", _memory, True),
    Unknown("first-contact", "how long does the first message of a pair take?", "pairs are warmed up before the first "
            "call", "memory", _contact, True),
    Unknown("masked-rows-mode-1", "what does a row give that an explicit mask hides wholly?",
            "mean of v, maximum lowest fp32, sum the number of keys: made (0, -inf) here", "rows",
            _rows("mode 1", "mean of v", "number of keys")),
    Unknown("masked-rows-mode-3", "what does a row give above the diagonal of mode 3?",
            "0, lowest fp32, highest fp32: made (0, -inf) here", "rows",
            _rows("mode 3", "zero", "highest fp32")),
    Unknown("no-mask", "is mode 3 without a mask full attention?", "yes, so that masks are always passed", "rows",
            _flag("no mask is full", "full attention", "not full attention")),
    Unknown("statistics", "are the eight statistics of a row equal, and lse = maximum + ln(sum)?", "yes", "rows",
            _flag("statistics", "equal, and the lse is right", "not equal, or another lse")),
    Unknown("packed-order", "how do TND statistics lie by default?", "sequence by sequence, heads first", "packed",
            _order("", "by sequence")),
    Unknown("packed-order-tnd", 'and with softmax_layout="TND"?', "token by token", "packed",
            _order("TND", "by token")),
    Unknown("packed-gradient", "are packed gradients right with statistics sequence by sequence?", "yes", "packed",
            _gradient("")),
    Unknown("packed-gradient-tnd", 'and token by token, with softmax_layout="TND"?', "yes, where the kernel is there",
            "packed", _gradient("TND")),
    Unknown("determinism", "are gradients the same every time?",
            "not by default; with torch.use_deterministic_algorithms they are", "determinism", _deterministic),
    Unknown("ring-update", "npu_ring_attention_update, packed: with a leading 0 in the lengths, with negative maxima?",
            "used in fp32 and layout SBH alone, after a trial", "updates", lambda found: _ring_update(found["ring"])),
    Unknown("attention-update", "does npu_attention_update merge in fp32?", "yes", "updates",
            lambda found: _update(found["update"])),
    Unknown("merging", "does npu_attention_update merge whole results in fp32 faster than torch's operators?",
            "yes: as many bytes, fewer launches", "merges", _merging, True),
    Unknown("kernel-tile", "is a tile of kernel npu-fusion exact, forward and backward?",
            "as emulated, against float64", "tile", _kernel),
    Unknown("kernel-packed", "are packed documents in one call exact, forward and backward?",
            "as emulated, against float64", "documents", _kernel),
    Unknown("kernel-shapes",
            "and with head dims 128, 192, 256, 64 heads, a batch, lengths no multiple of 16, 128K tokens?",
            "as emulated, against float64", "shapes", _kernel),
    Unknown("torch-merge", "do torch's operators merge rows that have seen nothing, and statistics beyond 88?",
            "yes: two rows of lse -inf stay (0, -inf)", "torchmerge", _torch_merge),
    Unknown("exactness", "is every schedule exact, forward and backward?", "as on the CPU, against float64",
            "schedules", _exact),
    Unknown("times", "which schedule is fastest?", "what `tokenring plan` predicts", "schedules", _times, True),
    *OF_LAYERS,
    *OF_JOBS,
)  # fmt: skip


def page() -> str:
    """The table, as docs/ascend.md has it."""
    rows = [f"| `{each.key}` | {each.question} | {each.assumed} |" for each in UNKNOWNS]
    return "\n".join(["| verdict | question | assumed until it is answered |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
