"""Run any schedule by the letter of its data, in plain torch and one process: the definition of what a schedule means.

A step has first the moves of q and kv, held before it; then tiles; then moves of partial results of tiles so far.
"""

from collections.abc import Callable, Iterator

import torch

import tokenring as tr
from tokenring.ir.schedule_data import Block, Pass, Tile

Rows = list[torch.Tensor]  # what a block has: q (and dout, lse, delta), or k and v, or a partial result
Held = list[dict[Block, Rows]]  # of each rank


class ReferenceExecutor:
    """Play a schedule's ranks over whole tensors q [T, Hq, D] and k, v [S, Hkv, D]; blocks are cut out of them."""
    def __init__(self, schedule: tr.Schedule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.schedule, self.scale, self.whole = schedule, q.shape[-1] ** -0.5, {"q": [q], "kv": [k, v]}
        self.sizes = tr.Workload(1, len(q), len(k), q.shape[1], k.shape[1], q.shape[2])
        self.visible = torch.tensor([[schedule.mask.allows(i, j) for j in range(len(k))] for i in range(len(q))])
        self.held: Held = [{} for _ in range(schedule.world_size)]

    def forward(self) -> Rows:
        """Return out [T, Hq, D] and lse [T, Hq]."""
        out = nothing([q := self.whole["q"][0], q[..., 0]])
        return self.bring_home(self.play("forward", merge), "q_partial", out, merge)

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Rows:
        """Return dq, dk and dv. With q travel dout, lse and delta, which its gradient needs."""
        self.whole["q"] += [dout, lse, (out * dout).sum(-1)]
        made, zeros = self.play("backward", add), nothing([dout, *self.whole["kv"]])
        return self.bring_home(made, "q_partial", zeros[:1], add) + self.bring_home(made, "kv_partial", zeros[1:], add)

    def play(self, direction: Pass, join: Callable[[Rows, Rows], None]) -> Held:
        """Play one pass of all ranks; return the partial results that each has at its end."""
        schedule, moves = self.schedule, self.schedule.moves_in(direction)
        held = self.held = [{b: x for b, x in h.items() if "kv" in schedule.keep and b.kind == "kv"} for h in self.held]
        made = [dict[Block, Rows]() for _ in held]
        for block in {b for tile in schedule.tiles for b in (*tile.q, *tile.kv)}:
            held[schedule.owner(block)][block] = [x[self.rows(block)] for x in self.whole[block.kind]]
        for step in sorted({t.step for t in schedule.tiles} | {m.step for m in moves}):
            now = [move for move in moves if move.step == step]
            for dst, block, rows in [(m.dst, m.block, held[m.src][m.block]) for m in now if m.block.made_at is None]:
                held[dst][block] = rows
            for tile in (each for each in schedule.tiles if each.step == step):
                for block, rows in self.attend(tile, held[tile.rank], direction):
                    join(made[tile.rank].setdefault(block, nothing(rows)), rows)
            for move in (each for each in now if each.block.made_at is not None):
                name = move.block._replace(made_at=move.dst if move.add else move.block.made_at)
                join(made[move.dst].setdefault(name, nothing(rows := made[move.src].pop(move.block))), rows)
        return made

    def attend(self, tile: Tile, held: dict[Block, Rows], direction: Pass) -> Iterator[tuple[Block, Rows]]:
        """Yield a tile's partials: (out, lse) of a q block; in backward (dq,) of one and (dk, dv) of a kv block."""
        for a, b in ((a, b) for a in tile.q for b in tile.kv):
            (q, *more), (k, v) = held[a], held[b]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            seen = self.visible[self.rows(a)[0], self.rows(b)[0].T]
            score = (torch.einsum("ihd,jhd->ihj", q, k) * self.scale).masked_fill(~seen[:, None], -torch.inf)
            lse = more[1] if more else score.logsumexp(-1)
            p = (score - lse[..., None]).exp().nan_to_num(0.0)  # of a row that sees nothing: -inf less -inf
            if not more:
                yield a.partial(tile.rank), [torch.einsum("ihj,jhd->ihd", p, v), lse]
                continue
            dout, _, delta = more
            ds = p * (torch.einsum("ihd,jhd->ihj", dout, v) - delta[..., None]) * self.scale
            yield a.partial(tile.rank), [torch.einsum("ihj,jhd->ihd", ds, k)]
            dkv = torch.einsum("ihj,ihd->jhd", ds, q), torch.einsum("ihj,ihd->jhd", p, dout)
            yield b.partial(tile.rank), [x.reshape(len(x), held[b][0].shape[1], -1, x.shape[-1]).sum(2) for x in dkv]

    def bring_home(self, made: Held, kind: str, results: Rows, join: Callable[[Rows, Rows], None]) -> Rows:
        """Join the partial results that lie at their owners into whole tensors, and return these."""
        for block, rows in ((b, rows) for each in made for b, rows in each.items() if b.kind == kind):
            join(here := [x[self.rows(block)] for x in results], rows)
            for whole, part in zip(results, here, strict=True):
                whole[self.rows(block)] = part
        return results

    def rows(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Index a block's positions, and the heads of its group."""
        span = self.sizes.q_head_range if block.kind.startswith("q") else self.sizes.kv_head_range
        heads = torch.arange(*span(block.heads, self.schedule.head_groups))
        return torch.arange(*self.schedule.positions(block))[:, None], heads


def merge(ours: Rows, theirs: Rows) -> None:
    """Join two partial results (out, lse) of the same rows, in place."""
    lse = torch.logaddexp(ours[1], theirs[1])
    a, b = ((side[1] - lse).exp().nan_to_num(0.0)[..., None] * side[0] for side in (ours, theirs))
    ours[:] = [a + b, lse]


def add(ours: Rows, theirs: Rows) -> None:
    ours[:] = [mine + other for mine, other in zip(ours, theirs, strict=True)]


def nothing(rows: Rows) -> Rows:  # the partial result of no column
    return [torch.zeros_like(x) if x.dim() == 3 else torch.full_like(x, -torch.inf) for x in rows]
