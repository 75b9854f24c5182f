"""What the memory costs: one table, and one line of JSON.

    python scripts/bench.py                # about 12 minutes on 2 cores
    python scripts/bench.py --only gpt     # one part: gpt, overhead, generation, parts, stream
    python scripts/bench.py --only streams # long streams of all schedules and densities, in both
                                           # precisions, about 15 minutes
    python scripts/bench.py --only gpt2    # a training step of GPT-2 small, about 2 minutes

Ratios are medians over rounds in which both sides run one after the other, so that a noisy
machine slows both; it is told of, all the same.  All is measured with one thread and with as many
as there are cores; names that end in _1t are of one.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fairseq_inf.models  # noqa: F401  (registers them)
from fairseq_inf.memory import ContinuousMemory
from fairseq_inf.models.generation import Continuation, new_reading, read

PAPER = {"ltm_schedule": "constant", "ltm_density": "gaussian", "ltm_widths": "0.01,0.05"}
GIBBS = {"ltm_schedule": "uniform", "ltm_density": "gibbs", "ltm_widths": "auto"}


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
        for module in self.modules():  # as GPT-2 starts; at N(0, 1) its gradients are denormal
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, starts):
        b, t = tokens.shape
        x = self.words(tokens) + self.places.weight[:t]
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm1"](x)).view(b, t, 3, self.heads, -1)
            z = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + layer["out"](z.transpose(1, 2).reshape(b, t, -1))
            x = x + layer["outer"](F.gelu(layer["inner"](layer["norm2"](x))))
        return F.linear(self.norm(x), self.words.weight)

    def cache(self, rows):
        shape = (rows, self.heads, len(self.places.weight), self.words.weight.size(1) // self.heads)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]

    def feed(self, tokens, place, cache):
        """One token a row at a place, with the keys and values of those before it."""
        b = len(tokens)
        x = self.words(tokens) + self.places.weight[place]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            q, keys[:, :, place], values[:, :, place] = (
                layer["qkv"](layer["norm1"](x)).view(b, 3, self.heads, -1).unbind(1)
            )
            z = F.scaled_dot_product_attention(
                q[:, :, None], keys[:, :, : place + 1], values[:, :, : place + 1]
            )
            x = x + layer["out"](z.reshape(b, -1))
            x = x + layer["outer"](F.gelu(layer["inner"](layer["norm2"](x))))
        return F.linear(self.norm(x), self.words.weight)


def build(arch, words, **sizes):
    dictionary = Dictionary()
    for i in range(words - len(dictionary)):
        dictionary.add_symbol(str(i))
    model = ARCH_MODEL_REGISTRY[arch]
    cfg = model.config(dropout=0.0, **sizes)
    cfg.seed = 1
    return model.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))


def infinite_former(words, **sizes):
    return build("infinite_former_lm", words, **sizes)


def transformer_xl(words, **sizes):
    return build("transformer_xl_lm", words, **sizes)


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


class Denormals(TorchDispatchMode):
    """Counts the numbers too small to be normal that operations give, forward and backward: a CPU
    takes many times as long for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        new = "empty" in operation.name()  # it holds anything
        for x in () if new else tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                size = x.detach().abs()
                self.count += int(((size > 0) & (size < torch.finfo(x.dtype).tiny)).sum())
        return out


def machine_seconds():
    """Processor time of the whole machine, stolen time included, and of this process."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, stolen, *_ = map(int, file.readline().split()[1:])
    busy = user + nice + system + irq + soft + stolen
    return busy / os.sysconf("SC_CLK_TCK"), time.process_time()


class Quiet:
    """Tells, after a measurement, if anything else was at work."""

    def __init__(self, out, part):
        self.out, self.part = out, part

    def __enter__(self):
        self.known = os.path.exists("/proc/stat")
        self.begin = time.perf_counter(), *(machine_seconds() if self.known else ())

    def __exit__(self, *error):
        if not self.known:
            return
        wall, busy, own = (
            a - b
            for a, b in zip((time.perf_counter(), *machine_seconds()), self.begin, strict=True)
        )
        others = max(0.0, busy - own) / wall
        self.out[f"others_{self.part}"] = round(others, 3)
        if others > 0.05:
            print(
                f"warning: while {self.part} was measured, other work took {others:.2f} of a core",
                file=sys.stderr,
            )


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
        transformer_xl(1000, **sizes),
        infinite_former(1000, ltm_basis=150, **PAPER, **sizes),
        infinite_former(1000, ltm_basis=150, ltm_sticky=True, **PAPER, **sizes),
        infinite_former(1000, ltm_basis=150, **GIBBS, **sizes),
    ]
    times = side_by_side(models, 4, 150, 1000, True, rounds)
    out["memory_overhead"] = ratio(times, 1, 0)
    out["sticky_overhead"] = ratio(times, 2, 0)
    out["gibbs_overhead"] = ratio(times, 3, 0)
    out["gibbs_cost_vs_gaussian"] = ratio(times, 3, 1)


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
    ours = infinite_former(words, ltm_basis=256, ltm_sticky=True, **PAPER, **sizes)
    short = transformer_xl(words, **sizes)
    gibbs = infinite_former(words, ltm_basis=256, **GIBBS, **sizes)
    rate = gemm_rate()
    for mode, train in (("train", True), ("eval", False)):
        times = side_by_side([gpt, ours, short, gibbs], rows, length, words, train, rounds)
        out[f"{mode}_cost_gibbs_vs_gpt"] = ratio(times, 3, 0)
        out[f"{mode}_cost_vs_gpt"] = ratio(times, 1, 0)
        out[f"{mode}_cost_transformer_xl_vs_gpt"] = ratio(times, 2, 0)
        out[f"{mode}_tokens_per_s"] = rows * length / typical(times, 1)
        if train:
            tokens = torch.randint(4, words, (rows, length))
            with FlopCounterMode(display=False) as counter:
                step(ours.train(), torch.optim.SGD(ours.parameters(), 0.0), tokens, False)
            out["gemm_gflops"] = rate / 1e9
            out["gemm_share"] = counter.get_total_flops() / typical(times, 1) / rate
        for name, model in (("paper", ours), ("gibbs", gibbs), ("gpt", gpt)):
            tokens = torch.randint(4, words, (rows, length))
            optimizer = torch.optim.SGD(model.parameters(), 0.0) if train else None
            with Denormals() as found, torch.set_grad_enabled(train):
                step(model.train(train), optimizer, tokens, False)
            out[f"{mode}_denormals_{name}"] = found.count


@torch.no_grad()
def bench_generation(out, rounds):
    """Milliseconds a generated token, B = 1, over a whole segment of 256 and its border.

    The GPT has as many keys to look at as the others have on average, in its short-term memory
    and segment.  To recompute the window is to run the model over its 512 tokens for each new
    one; to recompute the segment, over those since the last border, with the memory at hand.
    """
    words, length = 8192, 256
    sizes = {
        "decoder_layers": 4,
        "decoder_embed_dim": 256,
        "decoder_ffn_embed_dim": 1024,
        "decoder_attention_heads": 4,
        "stm_length": length,
    }
    gpt = GPT(words, 4, 256, 4, 1024, 2 * length).eval()
    ours = infinite_former(words, ltm_basis=256, ltm_sticky=True, **PAPER, **sizes).eval()
    short = transformer_xl(words, **sizes).eval()

    def prompted(model, size):
        text = torch.randint(4, words, (1, size))
        reading = new_reading(model.decoder, 1, length)
        return read(model.decoder, reading, text, torch.tensor([size]))

    def generate(model, reading):
        go_on, times = Continuation(model.decoder, reading), []
        for _ in range(length):
            token = go_on.output[:, 0].argmax(dim=-1)
            times.append(seconds(lambda t=token: go_on.feed(t)))
        return times

    def generate_gpt():
        cache, token, times = gpt.cache(1), torch.tensor([5]), []
        for place in range(length, 2 * length):
            begin = time.perf_counter()
            token = gpt.feed(token, place, cache).argmax(dim=-1)
            times.append(time.perf_counter() - begin)
        return times

    readings = {size: prompted(ours, size) for size in (1_000, 4_096, 100_000)}
    plain = prompted(short, 4_096)
    fast = {"gpt": [], "xl": [], 1_000: [], 4_096: [], 100_000: []}
    for _ in range(rounds):
        fast["gpt"].append(generate_gpt())
        fast["xl"].append(generate(short, plain))
        for size, reading in readings.items():
            fast[size].append(generate(ours, reading))

    def mean(name):  # of a whole segment, each token at its median over the rounds
        return statistics.mean(map(statistics.median, zip(*fast[name], strict=True)))

    def growth():  # round by round, since the machine's speed wanders
        pairs = zip(fast[100_000], fast[1_000], strict=True)
        return statistics.median(sum(a) / sum(b) for a, b in pairs)

    state, decoder = readings[4_096].memory, ours.decoder
    window = torch.randint(4, words, (1, 2 * length))
    early = decoder.initial_state(1)
    slow_window = [seconds(lambda: decoder(window, early)) for _ in range(rounds + 1)][1:]
    slow_segment = [
        [seconds(lambda n=n: decoder(window[:, :n], state)) for n in range(1, length + 1, 15)]
        for _ in range(rounds)
    ]
    segment = statistics.mean(map(statistics.median, zip(*slow_segment, strict=True)))
    out["generate_ms"] = 1e3 * mean(4_096)
    out["generate_cost_vs_gpt"] = mean(4_096) / mean("gpt")
    out["generate_cost_transformer_xl_vs_gpt"] = mean("xl") / mean("gpt")
    out["generate_growth_1k_100k"] = growth()
    out["generate_gain_over_window"] = statistics.median(slow_window) / mean(4_096)
    out["generate_gain_over_segment"] = segment / mean(4_096)


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


def bench_stream(out, segments, dtype, name="", rounds=60, **memory):
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
        **memory,
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
    out[f"stream_tokens{name}"] = int(state.position)
    out[f"segment_ms{name}"] = [round(1e3 * typical(times, i), 3) for i in range(len(marks))]
    out[f"segment_time_growth{name}"] = ratio(times, -1, 0)
    out[f"peak_memory_mb{name}"] = [round(peak[i] / 1024) for i in marks]
    out[f"peak_memory_growth{name}"] = peak[segments] / peak[10]


def bench_gpt2(out, rounds):
    """GPT-2 small (124M) at L = N = 512, a row at a time: a step with the memory and without."""
    words, length = 50260, 512
    memory = {**PAPER, "ltm_basis": length, "ltm_widths": "0.005,0.01", "attention_dropout": 0.0}
    ours = build("infinite_former_lm_gpt2", words, **memory)
    times = side_by_side([ours], 1, length, words, True, 1)
    out["gpt2_step_s"] = typical(times, 0)
    out["gpt2_peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sticky = build("infinite_former_lm_gpt2", words, ltm_sticky=True, **memory)
    alone = build("gpt2_lm", words, attention_dropout=0.0)
    times = side_by_side([alone, ours, sticky], 1, length, words, True, rounds)
    out["gpt2_step_s"] = typical(times, 1)
    out["gpt2_memory_overhead"] = ratio(times, 1, 0)
    out["gpt2_sticky_overhead"] = ratio(times, 2, 0)


EXPLAINED = {
    "gpt2_step_s": "training step of GPT-2 small with a memory, 512 tokens, seconds",
    "gpt2_peak_memory_mb": "its peak memory, parameters and Adam included, MB",
    "gpt2_memory_overhead": "step with memory / without",
    "gpt2_sticky_overhead": "the same with sticky memories",
    "memory_overhead": "step with memory / without, WikiText-103 layers, B = 4",
    "sticky_overhead": "the same with sticky memories",
    "gibbs_overhead": "the same with a uniform schedule and a Gibbs density",
    "gibbs_cost_vs_gaussian": "step with a Gibbs density / with a Gaussian",
    "train_cost_vs_gpt": "training step / that of a plain GPT",
    "eval_cost_vs_gpt": "evaluation / that of a plain GPT",
    "train_cost_gibbs_vs_gpt": "the same with a uniform schedule and a Gibbs density",
    "eval_cost_gibbs_vs_gpt": "evaluation, alike",
    "train_cost_transformer_xl_vs_gpt": "training step of transformer_xl_lm / GPT",
    "eval_cost_transformer_xl_vs_gpt": "evaluation of transformer_xl_lm / GPT",
    "train_tokens_per_s": "tokens a second in training",
    "eval_tokens_per_s": "tokens a second in evaluation",
    "train_denormals_gpt": "numbers too small to be normal in a step of the GPT",
    "train_denormals_paper": "the same in a step with the paper's memory",
    "train_denormals_gibbs": "and with a Gibbs density",
    "eval_denormals_gpt": "in an evaluation of the GPT",
    "eval_denormals_paper": "with the paper's memory",
    "eval_denormals_gibbs": "and with a Gibbs density",
    "gemm_gflops": "matrix products of this machine, GFLOP/s",
    "gemm_share": "share of that rate that a training step reaches",
    "generate_ms": "ms a generated token after a prompt of 4,096, B = 1",
    "generate_cost_vs_gpt": "that / a plain GPT with a cache",
    "generate_cost_transformer_xl_vs_gpt": "transformer_xl_lm / the same GPT",
    "generate_growth_1k_100k": "a token after 100,000 / after 1,000",
    "generate_gain_over_window": "recomputing the window of 512 / cached",
    "generate_gain_over_segment": "recomputing the segment only / cached",
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


PARTS = {
    "gpt": bench_against_gpt,
    "overhead": bench_overhead,
    "generation": lambda out, rounds: bench_generation(out, max(3, rounds // 2)),
    "parts": lambda out, rounds: bench_parts(out, 3 * rounds),
}


def bench_streams(out, segments):
    for schedule in ("constant", "uniform", "logarithmic"):
        for density, widths in (("gaussian", "0.01,0.05"), ("gibbs", "auto")):
            kind = {"ltm_schedule": schedule, "ltm_density": density, "ltm_widths": widths}
            for name, dtype in (("", torch.float32), ("_bf16", torch.bfloat16)):
                name = f" {schedule} {density}{name}"
                bench_stream(out, segments, dtype, name, **kind)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each comparison")
    parser.add_argument("--segments", type=int, default=10_000, help="segments of the stream")
    parser.add_argument("--only", choices=[*PARTS, "stream", "streams", "gpt2"], help="one part")
    args = parser.parse_args()
    if args.rounds < 1 or args.segments < 100:
        parser.error("--rounds must be at least 1 and --segments at least 100")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out = {"threads": cores, "torch": torch.__version__}
    torch.set_num_threads(cores)
    # the stream comes first: what runs before it would hide its own peak memory
    if args.only in (None, "stream", "streams"):
        torch.manual_seed(0)
        with Quiet(out, "stream"):
            bench_stream(out, args.segments, torch.float32, ltm_sticky=True, **PAPER)
            if args.only == "streams":
                bench_streams(out, args.segments)
    if args.only == "gpt2":
        with Quiet(out, "gpt2"):
            bench_gpt2(out, args.rounds)
    for name, part in PARTS.items():
        if args.only not in (None, name):
            continue
        for threads in dict.fromkeys((cores, 1)):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            ending = "" if threads == cores else "_1t"
            found = {}
            with Quiet(out, name + ending):
                part(found, args.rounds)
            out |= {key + ending: value for key, value in found.items()}
    for name, value in out.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        explained = EXPLAINED.get(name.split()[0].removesuffix("_1t"), "")
        print(f"{name:36} {shown:>24}  {explained}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
