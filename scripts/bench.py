"""What the memory costs: one table, and one line of JSON.

    python scripts/bench.py                # about 5 minutes on 2 cores
    python scripts/bench.py --bf16         # the long stream in bfloat16

Ratios are medians over rounds in which both sides run one after the other, so that a noisy
machine slows both.
"""

import argparse
import json
import resource
import statistics
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fairseq_inf.memory import ContinuousMemory
from fairseq_inf.models.infinite_former import InfiniteFormerConfig, InfiniteFormerLM


class GPT(nn.Module):
    """A plain causal transformer without memory, of the same sizes: what to compare with."""

    def __init__(self, words, layers, dim, heads, ffn, length):
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(dim),
                    "qkv": nn.Linear(dim, 3 * dim),
                    "out": nn.Linear(dim, dim),
                    "norm2": nn.LayerNorm(dim),
                    "inner": nn.Linear(dim, ffn),
                    "outer": nn.Linear(ffn, dim),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, starts):
        b, t = tokens.shape
        x = self.words(tokens) + self.places.weight[:t]
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm1"](x)).view(b, t, 3, self.heads, -1)
            z = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + layer["out"](z.transpose(1, 2).reshape(b, t, -1))
            x = x + layer["outer"](F.gelu(layer["inner"](layer["norm2"](x))))
        return F.linear(self.norm(x), self.words.weight)


def infinite_former(words, **sizes):
    dictionary = Dictionary()
    for i in range(words - len(dictionary)):
        dictionary.add_symbol(str(i))
    cfg = InfiniteFormerConfig(dropout=0.0, **sizes)
    cfg.seed = 1
    return InfiniteFormerLM.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))


def logits(model, tokens, first):
    starts = torch.full((len(tokens),), first)
    return model(tokens, starts) if isinstance(model, GPT) else model(tokens, None, starts)[0]


def step(model, optimizer, tokens, first):
    loss = F.cross_entropy(logits(model, tokens, first).flatten(0, 1), tokens.flatten())
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def seconds(f):
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def side_by_side(models, rows, length, words, train, rounds):
    """Seconds of each model in each round, after the memories have filled."""
    optimizers = [torch.optim.Adam(m.parameters(), 1e-4) if train else None for m in models]
    times = []
    with torch.set_grad_enabled(train):
        for i in range(rounds + 4):
            tokens = torch.randint(4, words, (rows, length))
            times.append(
                [
                    seconds(lambda m=m, o=o, t=tokens, i=i: step(m.train(train), o, t, i == 0))
                    for m, o in zip(models, optimizers, strict=True)
                ]
            )
    return times[4:]


def ratio(times, a, b):
    return statistics.median(t[a] / t[b] for t in times)


def typical(times, a):
    return statistics.median(t[a] for t in times)


def gemm_rate(rounds=10):
    """FLOP/s of a matrix product that suits the machine."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b
    return 2 * 1024**3 / min(seconds(lambda: a @ b) for _ in range(rounds))


def bench_overhead(out, rounds):
    """Two layers of the WikiText-103 shape, B = 4: a step with the memory and without."""
    sizes = {
        "decoder_layers": 2,
        "decoder_embed_dim": 410,
        "decoder_ffn_embed_dim": 2100,
        "decoder_attention_heads": 10,
        "stm_length": 150,
    }
    models = [
        infinite_former(1000, ltm_basis=basis, ltm_sticky=sticky, **sizes)
        for basis, sticky in ((0, False), (150, False), (150, True))
    ]
    times = side_by_side(models, 4, 150, 1000, True, rounds)
    out["memory_overhead"] = ratio(times, 1, 0)
    out["sticky_overhead"] = ratio(times, 2, 0)


def bench_against_gpt(out, rounds):
    words, length, rows = 8192, 256, 8
    sizes = {
        "decoder_layers": 4,
        "decoder_embed_dim": 256,
        "decoder_ffn_embed_dim": 1024,
        "decoder_attention_heads": 4,
        "stm_length": 256,
    }
    gpt = GPT(words, 4, 256, 4, 1024, length)
    ours = infinite_former(words, ltm_basis=256, ltm_sticky=True, **sizes)
    short = infinite_former(words, ltm_basis=0, **sizes)
    rate = gemm_rate()
    for mode, train in (("train", True), ("eval", False)):
        times = side_by_side([gpt, ours, short], rows, length, words, train, rounds)
        out[f"{mode}_cost_vs_gpt"] = ratio(times, 1, 0)
        out[f"{mode}_cost_without_ltm_vs_gpt"] = ratio(times, 2, 0)
        out[f"{mode}_tokens_per_s"] = rows * length / typical(times, 1)
        if train:
            tokens = torch.randint(4, words, (rows, length))
            with FlopCounterMode(display=False) as counter:
                step(ours.train(), torch.optim.SGD(ours.parameters(), 0.0), tokens, False)
            out["gemm_gflops"] = rate / 1e9
            out["gemm_share"] = counter.get_total_flops() / typical(times, 1) / rate


def bench_parts(out, rounds):
    """Milliseconds of the parts of one layer's memory, forward, WikiText-103 shape, B = 4."""
    memory = ContinuousMemory(410, 10, 150, sticky=True)
    plain = ContinuousMemory(410, 10, 150)
    query, x = torch.randn(4, 10, 150, 41), torch.randn(4, 150, 410)
    nothing, key = x[:, :0], torch.arange(4)
    with torch.no_grad():
        states = {}
        for name, m in (("sticky", memory), ("plain", plain)):
            state = m.initial_state(4)
            for _ in range(2):
                _, _, state = m(query, x, state, key=key)
            states[name] = state

        def read(m, name):
            return lambda: m(query, nothing, states[name])

        def both(m, name):
            return lambda: m(query, x, states[name], key=key)

        times = [
            [
                seconds(f)
                for f in (read(plain, "plain"), both(plain, "plain"), read(memory, "sticky"),
                          both(memory, "sticky"))
            ]
            for _ in range(rounds + 2)
        ][2:]  # fmt: skip
    out["read_ms"] = 1e3 * typical(times, 0)
    out["write_ms"] = 1e3 * statistics.median(t[1] - t[0] for t in times)
    out["histogram_ms"] = 1e3 * statistics.median(t[2] - t[0] for t in times)
    out["sampling_ms"] = 1e3 * statistics.median(t[3] - t[2] - (t[1] - t[0]) for t in times)


def bench_stream(out, segments, dtype, rounds=60):
    """One stream of many segments of 100 tokens: does the last cost what the first did?"""
    length, words = 100, 1000
    model = infinite_former(
        words,
        decoder_layers=2,
        decoder_embed_dim=128,
        decoder_ffn_embed_dim=512,
        decoder_attention_heads=4,
        stm_length=length,
        ltm_basis=length,
        ltm_sticky=True,
    ).to(dtype)
    decoder = model.eval().decoder
    generator = torch.Generator().manual_seed(0)
    state, kept, peak = decoder.initial_state(1), {}, {}
    marks = sorted({10, segments // 10, segments})
    with torch.no_grad():
        for i in range(1, segments + 1):
            tokens = torch.randint(4, words, (1, length), generator=generator)
            x, state, _ = decoder(tokens, state)
            if i in marks:
                assert torch.isfinite(x).all(), f"not finite after {i} segments"
                peak[i] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                kept[i] = state
        times = [
            [seconds(lambda s=kept[i]: decoder(tokens, s)) for i in marks] for _ in range(rounds)
        ]
    name = "" if dtype == torch.float32 else "_bf16"
    out[f"stream_tokens{name}"] = int(state.position)
    out[f"segment_ms{name}"] = [round(1e3 * typical(times, i), 3) for i in range(len(marks))]
    out[f"segment_time_growth{name}"] = ratio(times, -1, 0)
    out[f"peak_memory_mb{name}"] = [round(peak[i] / 1024) for i in marks]
    out[f"peak_memory_growth{name}"] = peak[segments] / peak[10]


EXPLAINED = {
    "memory_overhead": "step with memory / without, WikiText-103 layers, B = 4",
    "sticky_overhead": "the same with sticky memories",
    "train_cost_vs_gpt": "training step / that of a plain GPT",
    "eval_cost_vs_gpt": "evaluation / that of a plain GPT",
    "train_cost_without_ltm_vs_gpt": "training step without the long-term memory / GPT",
    "eval_cost_without_ltm_vs_gpt": "evaluation without the long-term memory / GPT",
    "train_tokens_per_s": "tokens a second in training",
    "eval_tokens_per_s": "tokens a second in evaluation",
    "gemm_gflops": "matrix products of this machine, GFLOP/s",
    "gemm_share": "share of that rate that a training step reaches",
    "read_ms": "read of one layer, ms",
    "write_ms": "write of one layer, ms",
    "histogram_ms": "histogram of sticky memories, ms",
    "sampling_ms": "sampling of sticky memories, ms",
    "stream_tokens": "tokens of the long stream",
    "segment_ms": "ms a segment after 10, a tenth of and all its segments",
    "segment_time_growth": "time of a segment at the end / at the start",
    "peak_memory_mb": "peak memory at the same places, MB",
    "peak_memory_growth": "peak memory at the end / at the start",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each comparison")
    parser.add_argument("--segments", type=int, default=10_000, help="segments of the stream")
    parser.add_argument("--bf16", action="store_true", help="only the stream, in bfloat16")
    args = parser.parse_args()
    if args.rounds < 1 or args.segments < 100:
        parser.error("--rounds must be at least 1 and --segments at least 100")
    torch.manual_seed(0)
    out = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    # the stream comes first: what runs before it would hide its own peak memory
    bench_stream(out, args.segments, torch.bfloat16 if args.bf16 else torch.float32)
    if not args.bf16:
        bench_overhead(out, args.rounds)
        bench_against_gpt(out, args.rounds)
        bench_parts(out, 3 * args.rounds)
    for name, value in out.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name:32} {shown:>24}  {EXPLAINED.get(name.removesuffix('_bf16'), '')}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
