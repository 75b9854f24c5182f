"""fairseq-inf-capacity: what a continuous memory keeps of each segment, in closed form.

A write is linear, B <- A B + C X, so that after n segments B = W X for one operator W of all
tokens.  For white vectors the best linear decoder of token i from B has R^2_i = W_i^T K^-1 W_i with
K = W W^T + E, and the sum over all tokens, the capacity spent, is at most N.  E is what float32
adds: each product in A B and C X is rounded by 2^-24 of its size, which later writes carry on.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_inf.commands import command_line
from fairseq_inf.errors import plain_errors
from fairseq_inf.memory import GaussianBasis, Schedule
from fairseq_inf.memory.basis import MOST
from fairseq_inf.memory.schedule import Constant, Logarithmic, Uniform, write_operators

from .report import pyplot, save, table, write_csv

COMMAND = "fairseq-inf-capacity"
ROUNDING = 2.0**-24
WORDS = (
    "A schedule says how much room in the signal a text has: constant, what was read before has a "
    "share tau of it at each write; uniform, every token has the same; logarithmic, the a0 newest "
    "tokens have as much as the 2 a0 before them, the 4 a0 before those and so on up to A.  R² is "
    "1 for what can be told again exactly, 0 for what is lost: of a segment's mean, and of a token "
    "in it. "
)
SCHEDULES = ("constant", "uniform", "logarithmic")

Write = tuple[Tensor | None, Tensor]  # A, None where there is no past, and C


@dataclass
class Retention:
    """R^2 by age, the last segment first."""

    tokens: Tensor  # n x L
    means: Tensor  # n: of the mean of each segment

    @property
    def capacity(self) -> float:
        return float(self.tokens.sum())


def retention(operators: Callable[[int, int], Write], length: int, segments: int) -> Retention:
    """operators(held, new): the maps of a write of `new` vectors to `held` ones.

    K = Z Z^T where Z is W beside a root of E; by Z^T = Q R, R^2_i is the squared length of row i
    of Q, which needs neither the square of a condition number nor a cutoff.
    """
    writes = [operators(number * length, length) for number in range(segments)]
    noise = _rounding(writes)
    stored, rounded = [], []
    later = torch.eye(len(noise[0]), dtype=torch.float64)  # what the later writes make of B
    for (carry, fit), error in zip(reversed(writes), reversed(noise), strict=True):
        stored.append(later @ fit)
        rounded.append(later * error)
        if carry is not None:  # the first write has none
            later = later @ carry
    z = torch.cat(stored + rounded, dim=1)
    size = z.norm(dim=1, keepdim=True).clamp(min=1e-300)
    q, _ = torch.linalg.qr((z / size).T)
    q = q[: length * segments].view(segments, length, -1)
    return Retention(q.square().sum(dim=-1), q.sum(dim=1).square().sum(dim=-1) / length)


def _rounding(writes: Sequence[Write]) -> list[Tensor]:
    """-> standard deviation of what float32 adds to B at each write: list of N"""
    found: list[Tensor] = []
    covariance = torch.zeros((), dtype=torch.float64)
    for carry, fit in writes:
        variance = fit.square().sum(dim=1)
        if carry is not None and found:
            variance = variance + carry.square() @ covariance.diagonal()
            covariance = carry @ covariance @ carry.T
        covariance = covariance + fit @ fit.T
        found.append(ROUNDING * variance.sqrt())
    return found


def schedule_operators(
    schedule: Schedule, basis: GaussianBasis, samples: int, ridge: float
) -> Callable[[int, int], Write]:
    """-> the `operators` of `retention`, each computed once."""
    known: dict[tuple[float | None, int], Write] = {}

    def operators(held: int, new: int) -> Write:
        step = schedule.step(held, new)
        if (step, new) not in known:
            design = schedule.design(step, new, samples)
            carry, _, fit = write_operators(basis, design, ridge)
            known[step, new] = carry, fit
        return known[step, new]

    return operators


def ages(segments: int) -> list[int]:
    """0, 1, 2, 4, 8, .. and the oldest"""
    powers = [2**i for i in range(segments.bit_length())]
    return sorted({0, segments - 1, *(age for age in powers if age < segments)})


def draw(path: str, found: dict[str, Retention], title: str) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4))
    for number, (name, kept) in enumerate(found.items()):
        age = range(1, len(kept.means) + 1)
        axes.plot(age, kept.means, color=f"C{number}", label=name)
        axes.plot(age, kept.tokens.mean(dim=1), ":", color=f"C{number}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("segments since then, 1 is the last one")
    axes.set_ylabel("R² of a segment's mean (dotted: of one token)")
    axes.set_ylim(0, 1.02)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    save(plt, figure, path)


def parse() -> tuple[argparse.Namespace, GaussianBasis]:
    parser = command_line(COMMAND, __doc__, epilog=WORDS)
    add = parser.add_argument
    add("--basis", type=int, default=64, help="basis functions, N (64)")
    add("--widths", default="auto", help="their widths, 0.01,0.05 (auto: one, of 1/N)")
    add("--schedule", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="one or several (all)")
    add("--tau", type=float, help="constant: share of the past (0.5); uniform: its ceiling (none)")
    add(
        "--recent",
        type=int,
        help="logarithmic: a0, up to which age there is full detail, in tokens (a segment)",
    )
    add("--oldest", type=int, help="logarithmic: A, the age that is lost, in tokens (all of them)")
    add("--samples", type=int, help="samples of the past at a write, M (2N)")
    add("--ridge", type=float, default=0.5, help="penalty of the regression (0.5)")
    add("--segment", type=int, default=64, help="tokens of a segment, L (64)")
    add("--segments", type=int, default=32, help="how many have been written (32)")
    add("--output", help="write OUTPUT.csv and OUTPUT.png, too")
    args = parser.parse_args()
    for flag in ("basis", "recent", "oldest", "samples", "segment", "segments"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag} must be at least 1, got {value}")
    if args.basis > MOST:
        parser.error(f"--basis must be at most {MOST:,}, got {args.basis:,}")
    if args.tau is not None and not 0 < args.tau < 1:
        parser.error(f"--tau must be strictly between 0 and 1, got {args.tau}")
    if not args.ridge > 0:
        parser.error(f"--ridge must be positive, got {args.ridge}")
    try:
        widths = [1 / args.basis]
        if args.widths != "auto":
            widths = [float(width) for width in args.widths.split(",")]
        basis = GaussianBasis(args.basis, widths)
    except ValueError:
        parser.error(
            f"--widths {args.widths} must be auto, or positive numbers, 0.01,0.05, that share "
            f"--basis {args.basis} evenly"
        )
    return args, basis


def main() -> None:
    args, basis = parse()
    tokens = args.segment * args.segments
    schedules: dict[str, Schedule] = {
        "constant": Constant(args.tau or 0.5),
        "uniform": Uniform(args.tau or 1.0),
        "logarithmic": Logarithmic(args.oldest or tokens, args.recent or args.segment),
    }
    samples = args.samples or 2 * args.basis
    found = {}
    for name in args.schedule:
        operators = schedule_operators(schedules[name], basis, samples, args.ridge)
        found[name] = retention(operators, args.segment, args.segments)
    head = ["R² after writes", *(x for name in found for x in (f"{name}: mean", "token"))]
    lines = []
    for age in ages(args.segments):
        cells = [(f"{k.means[age]:.2f}", f"{k.tokens[age].mean():.3f}") for k in found.values()]
        lines.append([str(age), *(cell for pair in cells for cell in pair)])
    print(table(head, lines))
    for name, kept in found.items():
        print(f"{name}: capacity spent {kept.capacity:.1f} of {args.basis}")
    if args.output:
        rows = [
            {
                "schedule": name,
                "age": age,
                "mean": float(kept.means[age]),
                "token": float(kept.tokens[age].mean()),
            }
            for name, kept in found.items()
            for age in range(args.segments)
        ]
        title = f"N = {args.basis}, {args.segments} segments of {args.segment} tokens"
        with plain_errors(COMMAND):
            write_csv(f"{args.output}.csv", ["schedule", "age", "mean", "token"], rows)
            draw(f"{args.output}.png", found, title)
        print(f"wrote {args.output}.csv and {args.output}.png")


if __name__ == "__main__":
    main()
