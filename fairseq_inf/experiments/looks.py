"""What a long context's attention looks at beyond the window, and what of it a memory could keep.

    python -m fairseq_inf.experiments.looks data-bin/smollm2 --bf16 \\
        --path imported/smollm2-slots/checkpoint.pt

Each document of the split is read in segments of L by the model with all of its first --tokens in
sight, and no memory.  From token --context on, the attention of each layer (of one query in
eight, over all heads) is shared out between

    sinks    the first tokens of the document
    window   the segment itself and the short-term memory of the checkpoint before it
    beyond   the rest

and of what goes beyond, how much would go to each choice of as many vectors as the checkpoint's
memory has slots:

    next     those right before the window
    picked   of each segment the quarter that was looked at most while in the window (--ltm-pick 4)
    returned those that were looked at most of late, wherever they stand: a look counts half after
             each segment
    best     what only who knows the future can choose
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import plain_errors
from fairseq_inf.memory.selective import EVERY, Candidates, SelectiveMemory, looks

from .worth import documents, load, new_parser, parse

SINKS = 4
Seen = list[tuple[Tensor, Tensor]]

# B documents, P keys


@torch.inference_mode()
def masses(decoder: Any, texts: Tensor, length: int) -> list[Seen]:
    """-> of each segment a list by layer: the mass of attention on each key so far, B x P, and what
    a memory goes by, B x P x 2"""
    found: list[Seen] = []
    state = decoder.initial_state(len(texts))
    for layer in decoder.layers:

        def watched(
            query: Tensor, key: Tensor, value: Tensor, positions: Any,
            layer: Any = layer, attend: Any = layer.attention.attend,
        ) -> Tensor:  # fmt: skip
            weights = layer.attention.weights(query, key, positions, EVERY)
            mass = weights.float().sum(dim=(1, 2))
            found[-1].append((mass, layer.memory.mark(weights, query.size(2), None)))
            return attend(query, key, value, positions)

        layer.attention.attend = watched
    for at in range(0, texts.size(1) - 1, length):
        found.append([])
        _, state, _ = decoder(texts[:, at : at + length], state, head=False)
    return found


def shared_out(found: Seen, length: int, window: int, slots: int, begin: int) -> Tensor:
    """found: `masses` of one layer.  -> mass on sinks, window and beyond, and of the latter on the
    next, the picked, the returned and the best ones: 7 x B"""
    rows, behind = len(found[0][0]), -(-window // length)  # segments that a window reaches back
    totals, late = torch.zeros(7, rows), torch.zeros(rows, 0)
    picked = torch.zeros(rows, 0, dtype=torch.long)  # places, the newest last
    for number, (mass, marks) in enumerate(found):
        mass = mass / mass.sum(dim=1, keepdim=True)
        end = number * length - window  # of what lies beyond
        first = max(SINKS, end - length)  # of what has just left
        if end > first:
            seen = [x for _, x in found[max(number - 1 - behind, 0) : number]]
            total = torch.stack([F.pad(x, (0, 0, 0, end))[:, first:end] for x in seen]).sum(dim=0)
            rating = looks(Candidates(total[..., 0], total[..., 1], torch.zeros(0)))
            quarter = rating.topk(-(-(end - first) // 4), dim=1).indices.sort(dim=1).values
            picked = torch.cat([picked, first + quarter], dim=1)[:, -slots:]
        if number * length >= begin:
            beyond, sinks = mass[:, SINKS:end], mass[:, :SINKS].sum(dim=1)
            most = min(slots, beyond.size(1))
            returned = late[:, SINKS:end].topk(most, dim=1).indices
            choices = (
                beyond[:, -slots:],
                mass.gather(1, picked),
                beyond.gather(1, returned),
                beyond.topk(most, dim=1).values,
            )
            far = beyond.sum(dim=1)
            totals += torch.stack([sinks, 1 - sinks - far, far, *(x.sum(1) for x in choices)])
        late = F.pad(late / 2, (0, marks.size(1) - late.size(1))) + marks[..., 0]
    return totals / (len(found) - -(-begin // length))


def main() -> None:
    parser = new_parser("looks", __doc__ or "")
    args, dtype = parse(parser)
    with plain_errors(parser.prog):
        decoder, length = load(args.path, args.data, dtype)
        window = decoder.stm_length
        if args.context < window + length:
            parser.error(f"--context {args.context} must be {window + length} at least")
        memory = decoder.layers[0].memory
        if not isinstance(memory, SelectiveMemory):
            parser.error(f"--path {args.path} has no selective memory")
        off = {"sink_tokens": 0, "ltm_slots": 1, "ltm_pick": 1, "ltm_enabled": False}
        decoder, _ = load(args.path, args.data, dtype, stm_length=args.tokens, **off)
        found = masses(decoder, documents(args.data, args.split, args.tokens), length)
    slots = memory.num_slots
    every = [
        shared_out(list(layer), length, window, slots, args.context).mean(dim=1)
        for layer in zip(*found, strict=True)
    ]

    def row(name: str, x: Tensor) -> list[str]:
        sinks, near, far, *choices = x.tolist()
        shares = [f"{100 * part / far:.1f}" for part in choices]
        return [name, *(f"{100 * y:.1f}" for y in (sinks, near, far)), *shares]

    head = ["layer", "sinks, %", "window", "beyond", f"of it: next {slots}"]
    head += ["picked", "returned", "best"]
    rows = [row(str(number), x) for number, x in enumerate(every)]
    rows.append(row("all", torch.stack(every).mean(dim=0)))
    print(table(head, rows))


if __name__ == "__main__":
    main()
