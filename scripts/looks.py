"""What a long context's attention looks at beyond the window, and what of it a memory could keep.

    python scripts/looks.py data-bin/smollm2 --path imported/smollm2-slots/checkpoint.pt --bf16

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

import torch
import torch.nn.functional as F
from worth import documents, load, new_parser, parse

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import plain_errors
from fairseq_inf.memory import rate
from fairseq_inf.modules.attention import LOOKS

SINKS = 4


@torch.inference_mode()
def masses(decoder, texts, length):
    """-> of each segment a list by layer: the mass of attention on each key so far, and what a
    memory goes by, each B x P"""
    found, state = [], decoder.initial_state(len(texts))
    for layer in decoder.layers:
        attend = layer.attention.attend

        def watched(query, key, value, positions, *more, own=layer.attention, attend=attend):
            mass = own.weights(query, key, positions, LOOKS).float().sum(dim=(1, 2))
            found[-1].append((mass, own.looked(query, key, positions, None)))  # B x P, B x P x 2
            return attend(query, key, value, positions, *more)

        layer.attention.attend = watched
    for at in range(0, texts.size(1) - 1, length):
        found.append([])
        _, state, _ = decoder(texts[:, at : at + length], state)
    return found


def shared_out(found, length, window, slots, begin):
    """found: `masses` of one layer.  -> mass on sinks, window and beyond, and of the latter on the
    next, the picked, the returned and the best ones, each B"""
    rows, behind = len(found[0][0]), -(-window // length)  # segments that a window reaches back
    totals, late = torch.zeros(7, rows), torch.zeros(rows, 0)
    picked = torch.zeros(rows, 0, dtype=torch.long)  # places, the newest last
    for number, (mass, looks) in enumerate(found):
        mass = mass / mass.sum(dim=1, keepdim=True)
        end = number * length - window  # of what lies beyond
        first = max(SINKS, end - length)  # of what has just left
        if end > first:
            seen = [x for _, x in found[max(number - 1 - behind, 0) : number]]
            marks = rate(sum(F.pad(x, (0, 0, 0, end))[:, first:end] for x in seen))
            quarter = marks.topk(-(-(end - first) // 4), dim=1).indices.sort(dim=1).values
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
        late = F.pad(late / 2, (0, looks.size(1) - late.size(1))) + looks[..., 0]
    return totals / (len(found) - -(-begin // length))


def main():
    parser = new_parser(__doc__)
    args, dtype = parse(parser)
    decoder, length = load(args.path, args.data, dtype)
    window = decoder.stm_length
    if args.context < window + length:
        parser.error(f"--context {args.context} must be {window + length} at least")
    memories = [layer.memory for layer in decoder.layers if layer.memory is not None]
    slots = max((memory.num_slots for memory in memories), default=0)
    if not slots:
        parser.error(f"--path {args.path} has no memory with slots")
    off = {"sink_tokens": 0, "slot_spacing": 0.0, "ltm_enabled": False}
    decoder, _ = load(args.path, args.data, dtype, stm_length=args.tokens, **off)
    found = masses(decoder, documents(args.data, args.split, args.tokens), length)
    every = []
    for number in range(len(decoder.layers)):
        own = [segment[number] for segment in found]
        every.append(shared_out(own, length, window, slots, args.context).mean(dim=1))

    def row(name, x):
        sinks, near, far, *kept = x.tolist()
        shares = [f"{100 * k / far:.1f}" for k in kept]
        return [name, *(f"{100 * y:.1f}" for y in (sinks, near, far)), *shares]

    head = ["layer", "sinks, %", "window", "beyond", f"of it: next {slots}"]
    head += ["picked", "returned", "best"]
    rows = [row(str(number), x) for number, x in enumerate(every)]
    rows.append(row("all", torch.stack(every).mean(dim=0)))
    print(table(head, rows))


if __name__ == "__main__":
    with plain_errors("looks.py"):
        main()
