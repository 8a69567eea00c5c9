"""What is unknown of whole jobs until they have run: messages by the hundred, beside other libraries', their cost."""

from __future__ import annotations

from npu_smoke.verdicts import AS_ASSUMED, CLOSE, MEASURED, OPEN, OTHERWISE, Found, Unknown, Verdict, yes

HOST_US, POST_US = 20.0, 100.0  # of an operation and of a post, on the host
CONTACT_SECONDS = 2.0  # of one communicator
KEPT = 0.9  # of the speed of messages that fill the buffer once
LOSS = 5e-3  # relative, in bf16
BESIDE = 1.3  # times what messages take alone


def _many(found: Found) -> Verdict:
    text = f"{found['messages']} messages of rank 0 over {found['communicators']} communicators"
    if found["stuck"]:
        return Verdict(OTHERWISE, f"{text} are stuck")
    text += f" are there after {found['seconds']:.3g} s; {found['wrong']} wrong on all ranks"
    return yes(not found["wrong"], text)


def _retried(found: Found) -> Verdict:
    if not str(found["device"]).startswith("Ascend910_93"):
        return Verdict(OPEN, f"HCCL retries on A3 alone, and this is {found['device']}")
    return _many(found)


def _lanes(found: Found) -> Verdict:
    if found["stuck"]:
        return Verdict(OTHERWISE, "messages of the transport, or the others', are stuck")
    text = f"all to all in {1e3 * found['alone']:.3g} ms alone, {1e3 * found['beside']:.3g} ms beside others"
    return yes(not found["wrong"], f"{text}; {found['wrong']} wrong")


def _lanes_time(found: Found) -> Verdict:
    share = found["beside"] / found["alone"]
    return yes(share <= BESIDE, f"beside two small all-reduces and a message: {share:.2f} × what they take alone")


def _launches(found: Found) -> Verdict:
    post = found["post us"]
    text = f"{found['host us']:.3g} µs of the host for an operation, {found['device us']:.3g} µs of the device"
    text += "" if post is None else f"; {post:.3g} µs of the host for a send or receive"
    return yes(found["host us"] <= HOST_US and (post is None or post <= POST_US), text)


def _curve(found: Found) -> Verdict:
    seconds = {int(size): each for size, each in found["seconds"].items()}
    shown = ", ".join(f"{_size(size)} {1e6 * each:.3g} µs" for size, each in sorted(seconds.items()))
    largest = max(seconds)
    return Verdict(MEASURED, f"{shown}: {largest / seconds[largest] / 1e9:.3g} GB/s at last")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"


def _chunks(found: Found) -> Verdict:
    wrong = ", ".join(map(str, found["wrong"]))
    text = f"{found['tried']} sizes about a buffer of {_size(found['chunk bytes'])}"
    return yes(not found["wrong"], f"{text}: {f'not whole with {wrong} bytes' if wrong else 'all whole'}")


def _chunking(found: Found) -> Verdict:
    """Of the largest message that fits the buffer, and of the largest of all."""
    seconds = {int(size): each for size, each in found["seconds"].items()}
    fits = [size for size in seconds if size <= found["chunk bytes"]]
    if not fits or max(seconds) in fits:
        return Verdict(OPEN, "no message was larger than the buffer, or none smaller")
    small, large = max(fits), max(seconds)
    rates = [size / seconds[size] / 1e9 for size in (small, large)]
    text = f"{rates[0]:.3g} GB/s at {_size(small)}, {rates[1]:.3g} GB/s at {_size(large)}"
    return yes(rates[1] >= KEPT * rates[0], f"{text}, with a buffer of {_size(found['chunk bytes'])}")


def _prepare_time(found: Found) -> Verdict:
    text = f"{found['seconds']:.3g} s for {found['communicators']} communicators"
    text += f", {found['closing seconds']:.3g} s to close"
    return yes(found["seconds"] <= CONTACT_SECONDS * found["communicators"], text)


def _prepare_memory(found: Found) -> Verdict:
    if found["bytes"] is None:
        return Verdict(OPEN, "the device does not tell its free memory")
    mib = {name: found[name] / 2**20 for name in ("bytes", "assumed bytes", "given back")}
    text = f"{mib['bytes']:.0f} MiB, where {mib['assumed bytes']:.0f} are reckoned; {mib['given back']:.0f} given back"
    close = abs(found["bytes"] / found["assumed bytes"] - 1) <= CLOSE
    return yes(close and found["given back"] >= (1 - CLOSE) * found["bytes"], text)


def _loss(found: Found) -> Verdict:
    alone, split = found["alone"], found["split"]
    if failed := found.get("failed"):
        return Verdict(OTHERWISE, f"with context parallelism {failed}")
    if not alone or len(alone) != len(split):
        return Verdict(OPEN, f"{len(alone)} losses without and {len(split)} with context parallelism were printed")
    worst = max(abs(b / a - 1) for a, b in zip(alone, split, strict=True))
    text = f"losses {alone} without and {split} with context parallelism: {worst:.1e} apart"
    return Verdict(AS_ASSUMED if worst <= LOSS else OTHERWISE, text)


OF_JOBS = (
    Unknown("many-receives", "do many receives that stand posted hold up sends, all to all in four lanes?",
            "no, in the one order of all ranks", "receives", _many),
    Unknown("many-receives-retry", "and with HCCL_OP_RETRY_ENABLE on, on A3?",
            "unknown: HCCL advises at most 5 communicators then", "retried", _retried, True),
    Unknown("lanes-beside-others", "do messages of the transport and of other groups wait for each other for ever?",
            "no", "lanes", _lanes),
    Unknown("lanes-time", "do they slow each other down?", "hardly", "lanes", _lanes_time, True),
    Unknown("launch-costs", "what do an operation and a message cost the host, a small operation the device?",
            f"at most {HOST_US:.0f} and {POST_US:.0f} µs of the host", "launches", _launches, True),
    Unknown("message-curve", "how long do messages of 4 KiB to 256 MiB take?", "what `tokenring rates` will measure",
            "curve", _curve, True),
    Unknown("chunks", "do messages larger than HCCL's buffer arrive whole?", "yes", "curve", _chunks),
    Unknown("chunking", "are they as fast as those that fill it once, with P2P_HCCL_BUFFSIZE as it is (20 MB)?", "yes",
            "curve", _chunking, True),
    Unknown("chunking-64", "and with P2P_HCCL_BUFFSIZE=64?", "yes, and no faster than with 20", "curve64",
            _chunking, True),
    Unknown("chunking-128", "and with P2P_HCCL_BUFFSIZE=128?", "yes, and no faster than with 20", "curve128",
            _chunking, True),
    Unknown("prepare-time", "how long does a transport's whole preparation take?",
            f"at most {CONTACT_SECONDS:g} s for each communicator of a rank", "prepared", _prepare_time, True),
    Unknown("prepare-memory", "how much memory does it take, and is it given back?",
            "2 × P2P_HCCL_BUFFSIZE for each communicator; all of it", "prepared", _prepare_memory, True),
    Unknown("mindspeed-loss", "is the loss under MindSpeed with context parallelism that without?",
            f"yes, within {LOSS:g} in bf16, after a step too", "mindspeed", _loss, True),
)  # fmt: skip
