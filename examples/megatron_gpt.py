"""A GPT of Megatron-core that trains on a CPU, split by tensor, context and data parallelism: TP × CP × DP.

    pip install --no-deps megatron-core==0.16.1
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 8 examples/megatron_gpt.py --tp 2 --cp 2

The ranks that are left over are data parallel. The text is Python's own documentation. It trains twice from the same
weights over the same data, with CP and with CP = 1, says how far apart the losses are, and draws both.

Megatron's command line, its DDP and its optimizer need GPUs; here gradients are summed by hand and AdamW is torch's.
What a user changes is one line: use_tokenring(spec).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenring.cli.demo.data import VOCABULARY, Text, text_tokens
from tokenring.display import svg
from tokenring.integrations.megatron import use_tokenring

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 128
RATE = 3e-3
ENDS = 5  # losses at either end that are averaged


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--cp", type=int, default=2, help="context parallel ranks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--picture", type=Path, help="where to write the loss curves, as SVG")
    return parser.parse_args()


def make_model(args: argparse.Namespace, cp: int) -> Any:
    """This rank's part of the model, with the groups of Megatron's parallel_state made for it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp, context_parallel_size=cp)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        attention_dropout=0.0,  # Megatron's default is 0.1
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tp,
        context_parallel_size=cp,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=use_tokenring(get_gpt_layer_local_spec(), schedule=args.schedule),  # the one line
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq,
        position_embedding_type="learned_absolute",  # Megatron's rotary embedding needs a GPU
    )


def my_part(batch: torch.Tensor) -> torch.Tensor:
    """Of whole sequences [B, T]: this replica's, and of each the two chunks of this context parallel rank."""
    from megatron.core import parallel_state as state

    rank, ranks = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
    mine = batch.chunk(state.get_data_parallel_world_size())[state.get_data_parallel_rank()]
    chunks = mine.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)


def train(args: argparse.Namespace, cp: int) -> list[float]:
    """The loss of each step, the mean over all tokens of all ranks."""
    from megatron.core import parallel_state

    model = make_model(args, cp)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    text, losses = Text(text_tokens(), args.seq, seed=0), []
    positions = torch.arange(args.seq).expand(args.batch, -1)
    for step in range(args.steps):
        windows = [text.batch() for _ in range(args.batch)]
        tokens, targets = (torch.cat([getattr(each, name) for each in windows]) for name in ("tokens", "targets"))
        optimizer.zero_grad()
        each_loss = model(my_part(tokens), my_part(positions), None, labels=my_part(targets))
        loss = each_loss.sum() / tokens.numel()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"CP {cp}  step {step + 1:3}  loss {losses[-1]:.4f}", flush=True)
    return losses


def picture(curves: dict[str, list[float]], title: str) -> str:
    """The curves as SVG; where they agree, the second lies upon the first."""
    width, height, left, bottom = 640, 360, 50, 320
    highest, last = max(map(max, curves.values())), max(map(len, curves.values())) - 1

    def point(step: float, loss: float) -> str:
        return f"{left + (width - left - 20) * step / max(1, last):.1f} {bottom - (bottom - 50) * loss / highest:.1f}"

    strokes = {"axis": ("#999", "#777"), "wide": ("#8ab6e8", "#3c6ea8"), "thin": ("#b03030", "#ff9080")}
    lines = [*svg.opening(width, height, title), *svg.style({"ink": ("#222", "#ddd")}, strokes)]
    lines.append(svg.text_at(left, 24, title, 14, weight="bold"))
    tick = svg.axis_step(highest, 6)
    for number in range(int(highest / tick) + 1):
        x, y = point(0, number * tick).split()
        lines.append(f'<path class="axis" d="M{x} {y}H{width - 20}" stroke-width="0.5"/>')
        lines.append(svg.text_at(float(x) - 6, float(y) + 4, f"{number * tick:g}", 11, anchor="end"))
    strokes_of = zip(curves.items(), (("wide", 5), ("thin", 1.5)), strict=True)
    for index, ((name, losses), (kind, size)) in enumerate(strokes_of):
        path = "L".join(point(step, loss) for step, loss in enumerate(losses))
        lines.append(f'<path class="{kind}" d="M{path}M400 {70 + 20 * index}h30" stroke-width="{size}"/>')
        lines.append(svg.text_at(438, 74 + 20 * index, name, 12))
    lines.append(svg.text_at(width / 2, height - 10, f"step, of {last + 1}", 12, anchor="middle"))
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    args = arguments()
    try:
        import megatron.core
    except ImportError:
        sys.exit("no Megatron-core here: pip install --no-deps megatron-core==0.16.1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("tokenring").setLevel(logging.INFO)  # the topology, and the plan of each kind of layer
    split, whole = train(args, args.cp), train(args, 1)
    if rank == 0:
        apart = max(abs(a - b) / b for a, b in zip(split, whole, strict=True))
        name = f"TP {args.tp} × CP {args.cp} × DP {world // args.tp // args.cp}"
        first, last = (sum(part) / len(part) for part in (split[:ENDS], split[-ENDS:]))
        print(f"Megatron-core {megatron.core.__version__}, {name}: loss {first:.3f} → {last:.3f} in {args.steps} steps")
        print(f"largest relative difference of a loss from CP = 1: {apart:.1e}")
        if args.picture is not None:
            curves = {"CP = 1": whole, name: split}
            args.picture.write_text(picture(curves, f"GPT of Megatron-core {megatron.core.__version__}: loss"))
            print(f"picture: {args.picture}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
