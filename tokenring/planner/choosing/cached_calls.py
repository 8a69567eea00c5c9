"""Ways to attend from new tokens to a KV cache that is dealt over ranks: the time of each, and the best.

A way is a few rounds of messages and a kernel, so its time is worked out, not simulated: rounds · latency, the busiest
wire's bytes, and the kernel's products or the bytes that it reads, whichever takes longer. What new tokens among
themselves take is the same in all ways over several ranks, and is left out. It counts beside one rank, where no
exchange hides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine

LSE_BYTES = 4
READS_ITS_RATE = "cpu-flash"  # the kernel whose rates were measured on what it reads from memory
GAIN = 0.95  # of the time of other ways: a ring has many rounds, and copies what is cached, which is in no formula
MOST_LENGTH = 1 << 32  # tokens, up to which a crossover is looked for


@dataclass(frozen=True)
class CachedCall:
    """New tokens (workload.q_length) over cached ones (workload.kv_length), forward, on a machine's interconnect."""

    workload: Workload
    interconnect: Interconnect
    machine: Machine

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.interconnect.world_size

    def with_lengths(self, tokens: int, cached: int) -> CachedCall:
        """Return the call with other numbers of new and of cached tokens."""
        return replace(self, workload=replace(self.workload, q_length=tokens, kv_length=cached))

    @property
    def q_bytes(self) -> int:
        """Bytes of q of all new tokens."""
        size = self.workload
        return size.batch * size.q_length * size.q_heads * size.head_dim * size.itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of a partial result of all new tokens: out and lse."""
        size = self.workload
        return size.batch * size.q_length * size.q_heads * (size.value_dim * size.itemsize + LSE_BYTES)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all cached keys and values, or of latents."""
        size = self.workload
        width = size.kv_heads * size.kv_dim if size.latent_dim is None else size.latent_dim
        return size.batch * size.kv_length * width * size.itemsize

    def kernel_seconds(self, tokens: float, cached: float) -> float:
        """Return the seconds of one kernel from so many new tokens to so many cached ones."""
        size, rates = self.workload, self.machine.rates
        flops = 2 * size.batch * size.q_heads * size.qo_dim * tokens * cached  # latents are read as keys and values
        rows = tokens * size.q_heads / size.kv_heads  # of a kv head
        computing = flops / (rates.tflops("forward", max(1, int(min(rows, cached)))) * 1e12)
        read = self.kv_bytes * cached / size.kv_length
        reading = 0.0 if self.machine.kernel == READS_ITS_RATE else read / (rates.copy_gbs * 1e9)
        return rates.call_seconds + max(computing, reading)

    @property
    def part_seconds(self) -> float:
        """Return the seconds of the kernel from a rank's part of new tokens to a rank's part of cached ones."""
        return self.kernel_seconds(self.workload.q_length / self.ranks, self.workload.kv_length / self.ranks)

    @property
    def new_seconds(self) -> float:
        """Return the seconds of kernels from new tokens to earlier new ones, beside those to what is cached."""
        tokens = self.workload.q_length
        return self.kernel_seconds(tokens, (tokens - 1) / 2) - self.machine.rates.call_seconds

    def round_seconds(self, pair_bytes: float, neighbours: bool = False) -> float:
        """Return the seconds of a round in which each rank sends every other (or only the next) so many bytes."""
        if self.ranks == 1:
            return 0.0
        return self.latency_seconds(1 if neighbours else self.ranks - 1) + self.wire_seconds(pair_bytes, neighbours)

    def latency_seconds(self, messages: int) -> float:
        """Return what a round of so many messages of each rank takes beside their bytes."""
        of = self.machine.messages
        posts = 2 * messages * of.post_seconds
        return posts * max(1.0, self.ranks / self.machine.shared_cores) + of.latency_seconds

    def wire_seconds(self, pair_bytes: float, neighbours: bool = False) -> float:
        """Return the seconds of the busiest wire of such a round, for the bytes alone."""
        if self.ranks == 1:
            return 0.0
        loads: dict[str, float] = defaultdict(float)
        for src in range(self.ranks):
            others = [(src + 1) % self.ranks] if neighbours else [dst for dst in range(self.ranks) if dst != src]
            for dst in others:
                for wire in self.interconnect.way(src, dst):
                    loads[wire] += pair_bytes
        widest = self.machine.messages.flow_gbs * 1e9
        return max(max(load / self.interconnect.gbs(wire) / 1e9 for wire, load in loads.items()), pair_bytes / widest)


@dataclass(frozen=True)
class CachedWay:
    """One way: what moves, how long its parts take, what a rank sends, and how many rounds of messages it has.

    exchange_seconds: what the exchange adds to the kernels; what runs behind them does not count.
    bound_seconds: what the way takes no less than, as if bytes and kernels ran fully behind each other.
    """

    name: str
    moves: str
    kernel_seconds: float
    exchange_seconds: float
    sent_bytes: float
    rounds: int
    seconds: float
    bound_seconds: float


def cached_ways(call: CachedCall) -> list[CachedWay]:
    """Return all ways, the fastest first."""
    found = (make(call) for make in (_one_rank, _one_shot, *_parted(call), _direct_q, _direct_kv, _ring))
    return sorted(found, key=lambda way: way.seconds)


def reduction(call: CachedCall) -> str:
    """Return the faster way to bring partial results of rows that every rank has to all ranks, in one round or two."""
    return min((_one_shot(call), *(make(call) for make in _parted(call))), key=lambda way: way.seconds).name


def of_own_rows(call: CachedCall) -> str:
    """Return the way of new tokens that are each rank's own: q moves, or what is cached goes round, or to all at once.

    To all at once only where a rank then holds no more than q of all tokens and their results are, which come to it
    where q moves: whether there is room for more is not known here.
    """
    ways = [(_direct_q(call), 1.0), (_ring(call), GAIN)]
    if goes_to_all(call):
        ways.append((_direct_kv(call), 1.0))
    return min(ways, key=lambda each: each[0].seconds / each[1])[0].name


def goes_to_all(call: CachedCall) -> bool:
    """Return whether all that is cached is no more than all rows of q and their results."""
    return call.kv_bytes <= call.q_bytes + call.result_bytes


def _least(call: CachedCall, kernel: float, wires: float, before: int, after: int) -> float:
    """Return what a way takes at least: of its kernels and its bytes the longer, and messages that nothing hides.

    wires: seconds of the busiest wire for the bytes of all rounds. before, after: how many rounds bring what kernels
    read, which own rows or keys can hide, and how many bring what they have made.
    """
    if call.ranks == 1:
        return kernel
    latency = call.machine.messages.latency_seconds
    return max(kernel, before * latency + wires) + after * latency


def _parted(call: CachedCall) -> tuple[Callable[[CachedCall], CachedWay], ...]:
    """Return the ways that cut query heads over the ranks, where these divide."""
    return () if call.workload.q_heads % call.ranks else (_two_step,)


def _one_rank(call: CachedCall) -> CachedWay:
    seconds = call.kernel_seconds(call.workload.q_length, call.workload.kv_length)
    return CachedWay("one rank", "nothing: one rank has the whole cache", seconds, 0.0, 0.0, 0, seconds, seconds)


def _one_shot(call: CachedCall) -> CachedWay:
    """Every rank has q: partial results go to all of them."""
    kernel = call.kernel_seconds(call.workload.q_length, call.workload.kv_length / call.ranks)
    exchange = call.round_seconds(call.result_bytes)
    sent = (call.ranks - 1) * call.result_bytes
    bound = _least(call, kernel, call.wire_seconds(call.result_bytes), 0, 1)
    return CachedWay("one-shot", "partial results, to all", kernel, exchange, sent, 1, kernel + exchange, bound)


def _two_step(call: CachedCall) -> CachedWay:
    """Every rank has q: partial results of a part of the heads go to one rank, and the result of it to all."""
    kernel = call.kernel_seconds(call.workload.q_length, call.workload.kv_length / call.ranks)
    exchange = 2 * call.round_seconds(call.result_bytes / call.ranks)
    sent = 2 * (call.ranks - 1) / call.ranks * call.result_bytes
    bound = _least(call, kernel, 2 * call.wire_seconds(call.result_bytes / call.ranks), 0, 2)
    return CachedWay(
        "two-step", "partial results by heads, then results", kernel, exchange, sent, 2, kernel + exchange, bound
    )  # fmt: skip


def _direct_q(call: CachedCall) -> CachedWay:
    """Each rank has a part of q: that goes to all, and partial results come back.

    A part of the tokens: a rank's own rows are attended from while those of others come, and each rank's by a kernel
    of their own. With fewer tokens than ranks it is a part of the heads, and one kernel has those of all.
    """
    ranks = call.ranks
    asking, back = call.round_seconds(call.q_bytes / ranks), call.round_seconds(call.result_bytes / ranks)
    if call.workload.q_length < ranks:
        kernels = call.kernel_seconds(call.workload.q_length, call.workload.kv_length / ranks)
        exposed = asking + back
    else:
        part = call.part_seconds
        kernels, exposed = ranks * part, max(0.0, asking - part) + back
    sent = (ranks - 1) / ranks * (call.q_bytes + call.result_bytes)
    bound = _least(call, kernels, call.wire_seconds((call.q_bytes + call.result_bytes) / ranks), 1, 1)
    return CachedWay("direct-q", "q, and partial results back", kernels, exposed, sent, 2, kernels + exposed, bound)


def _direct_kv(call: CachedCall) -> CachedWay:
    """Each rank has a part of q, and gets the whole cache; while it comes, it attends to its own part of it."""
    ranks, part = call.ranks, call.part_seconds
    kernels = ranks * part
    exposed = max(0.0, call.round_seconds(call.kv_bytes / ranks) - part)
    sent = (ranks - 1) / ranks * call.kv_bytes
    bound = _least(call, kernels, call.wire_seconds(call.kv_bytes / ranks), 1, 0)
    return CachedWay("direct-kv", "keys and values, to all", kernels, exposed, sent, 1, kernels + exposed, bound)


def _ring(call: CachedCall) -> CachedWay:
    """Each rank has a part of q; keys and values go round, behind the kernels where these take longer."""
    ranks, part = call.ranks, call.part_seconds
    step = call.round_seconds(call.kv_bytes / ranks, neighbours=True)
    sent, kernels = (ranks - 1) / ranks * call.kv_bytes, ranks * part
    exposed = (ranks - 1) * max(0.0, step - part)
    wires = (ranks - 1) * call.wire_seconds(call.kv_bytes / ranks, neighbours=True)
    bound = _least(call, kernels, wires, ranks - 1, 0)
    return CachedWay("ring", "keys and values, round", kernels, exposed, sent, ranks - 1, kernels + exposed, bound)


def least_cached_seconds(call: CachedCall) -> float:
    """Return what no way over all ranks takes less than, with the cache in place: the kernel beside the bytes, a round.

    At each rank's port no less has to pass than out of what it does not keep, and q of it, or where every rank has q
    the partial results that make its own.
    """
    kernel = call.kernel_seconds(call.workload.q_length, call.workload.kv_length / call.ranks)
    if call.ranks == 1:
        return kernel
    results = call.result_bytes - LSE_BYTES * call.workload.batch * call.workload.q_length * call.workload.q_heads
    bytes_seconds = call.wire_seconds((min(call.q_bytes, results) + results) / call.ranks)
    return max(kernel, bytes_seconds) + call.machine.messages.latency_seconds


def fewest(enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number from 1 on that is enough, where all larger ones are; None: none up to 2^32 is."""
    if not enough(MOST_LENGTH):
        return None
    low, high = 0, MOST_LENGTH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class Crossovers(NamedTuple):
    """Token counts from which another way is the faster one; None: nowhere.

    cache_moves: new tokens from which the cache moves rather than q. several: cached tokens from which several ranks
    that all have the new tokens are faster than one. two_step: new tokens, which every rank has, from which results go
    in two rounds.
    """

    cache_moves: int | None
    several: int | None
    two_step: int | None


def crossovers(call: CachedCall) -> Crossovers:
    """Return where ways cross."""
    cached, tokens = call.workload.kv_length, call.workload.q_length

    def cache_moves(count: int) -> bool:
        other = call.with_lengths(count, cached)
        return min(_direct_kv(other).seconds, _ring(other).seconds) < _direct_q(other).seconds

    def several(count: int) -> bool:
        other = call.with_lengths(tokens, count)
        ways = (make(other) for make in (_one_shot, *_parted(other)))  # of own tokens messages are left out
        new = other.new_seconds
        hiding = min(way.seconds + max(0.0, new - way.exchange_seconds) for way in ways)
        return hiding < _one_rank(other).seconds + new

    def in_two_steps(count: int) -> bool:
        return reduction(call.with_lengths(count, cached)) == "two-step"

    return Crossovers(fewest(cache_moves), fewest(several), fewest(in_two_steps))
