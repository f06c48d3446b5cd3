"""A cost model of one step on many machines: where does it stop scaling, and which minibatch keeps it efficient?

    python experiments/cost_model.py                  fit, validation and predictions
    python experiments/cost_model.py --plot cost.png  the same, and a figure

A step of P machines on a minibatch of P · B documents takes, in milliseconds,

    t = d B/E + r U(PB)/(PE) + [P > 1] (m U(B)/E + f + 2 w(x) + 3 (a + b P))

| letter  | meaning                                                                                 | where from      |
|---------|-----------------------------------------------------------------------------------------|-----------------|
| d, r    | fitting a document, updating a row of λ and of the window                               | fit             |
| m       | picking a row for another machine and adding what comes back                            | measured alone  |
| f       | packing, dispatch, waiting for the slower process                                       | fit             |
| a, b    | latency of an exchange, and per machine                                                 | measured alone  |
| U(n)    | different words in n documents                                                          | measured        |
| w(x)    | time to send x MB, x = 1.12 · 448 U(B) (P − 1)/P bytes: rows of β; and of statistics    | measured alone  |
| E       | what the cores of a machine are worth: 1 in the measurements, 6 for 8 cores (assumed)   | assumed         |

Measured with arXiv abstracts, V = 14,000, K = 100, L = 10, the variational step, one core per process, jax 0.12.0.1,
2026-11-18, by prototypes of the distributed engine; links of 1 and 10 Gbit/s were emulated on one machine. Nothing here
was measured on several machines or on a GPU: those lines are predictions.
"""

import argparse
import pathlib
from functools import partial

import numpy as np

# Different words in a minibatch of so many documents.
WORDS = {300: 4_784, 600: 6_571, 1_200: 8_638, 2_400: 10_765, 4_800: 12_550, 9_600: 13_630, 19_200: 13_967}
VOCABULARY, ROW_BYTES, SPREAD = 14_000, 448, 1.12  # 112 columns of float32; room for uneven numbers of rows

# (processes, documents per process, link in Gbit/s, milliseconds per step); loopback counts as a link of 1,000 Gbit/s.
LOOPBACK = 1_000
MEASURED = (
    (1, 300, LOOPBACK, 6.4),
    (1, 600, LOOPBACK, 10.7),
    (1, 1_200, LOOPBACK, 18.1),
    (1, 2_400, LOOPBACK, 31.5),
    (1, 4_800, LOOPBACK, 55.0),
    (2, 300, LOOPBACK, 11.2),
    (2, 1_200, LOOPBACK, 24.1),
    (2, 2_400, LOOPBACK, 36.8),
    (2, 300, 10, 12.9),
    (2, 2_400, 10, 43.1),
    (2, 300, 1, 36.6),
    (2, 2_400, 1, 100.5),
)
# all_to_all of small messages: processes, milliseconds.
LATENCIES = ((2, 0.17), (4, 0.28), (8, 0.48), (16, 0.95))
MERGE = 0.24e-3  # m; of a program that did nothing else
LINKS = (  # name, Gbit/s, bits per number, whether statistics enter one step late
    ("10 GbE", 10, 32, False),
    ("10 GbE, one step late", 10, 32, True),
    ("10 GbE, 16 bits", 10, 16, False),
    ("100 GbE", 100, 32, False),
    ("100 GbE, one step late", 100, 32, True),
)
CORES = 6.0  # E of a machine of 8 cores
SOCKET = 1.4  # MB per millisecond through the one I/O thread of gloo (loopback: 0.65 to 2.2)

# A GPU, by its data sheet: memory 1.5 TB/s; NCCL over NVLink at 200 GB/s within a machine of 8.
GPU_MEMORY, GPU_LINK, GPU_LATENCY = 1_500.0, 200.0, 0.05  # MB per millisecond, MB per millisecond, milliseconds
GPUS_PER_MACHINE = 8  # between machines: 100 GbE
# Rounds of the slowest document, each of about 12 kernels of 3 µs and a test of the condition of 10 µs (assumed).
LONGEST, LAUNCHES = 50, 0.046
ENTRIES, ROUNDS, PADDING, READS = 51, 11.9, 1.55, 2.6  # per document; rounds · padding as batched.py counts


def words(documents):
    """Return U, the number of different words in a minibatch."""
    sizes = [*WORDS, 1e6]
    return float(np.interp(np.log(documents), np.log(sizes), [*WORDS.values(), VOCABULARY]))


def wire(megabytes, gbit, peers):
    """Return the milliseconds for a message; TCP uses 95% of a link, and long messages of gloo half of it or more."""
    part = megabytes / max(peers, 1)
    efficiency = 1.0 if part < 0.15 else 0.75 if part < 0.4 else 0.55
    return megabytes / min(0.95 * efficiency * gbit / 8, SOCKET)


def terms(processes, batch_size):
    """Return the coefficients of d, r and f in t, for E = 1."""
    return np.array([batch_size, words(processes * batch_size) / processes, processes > 1])


def network(processes, batch_size, gbit, latency, bits=32):
    """Return the milliseconds of a step on the network: rows of β out, statistics back."""
    megabytes = SPREAD * words(batch_size) * ROW_BYTES * (bits / 32) * 1e-6 * (processes - 1) / processes
    return (2 * wire(megabytes, gbit, processes - 1) + 3 * (latency[0] + latency[1] * processes)) * (processes > 1)


def merging(processes, batch_size):
    """Return the milliseconds for picking and adding rows, for E = 1."""
    return MERGE * words(batch_size) * (processes > 1)


def fit():
    """Return (d, r, f) and (a, b), by least squares of the relative error; runs at 1 Gbit/s are left for validation."""
    slope, start = np.polyfit(*np.transpose(LATENCIES), 1)
    latency = start, slope
    runs = [run for run in MEASURED if run[2] == LOOPBACK]
    rows = np.array([terms(p, b) / t for p, b, _, t in runs])
    rest = np.array([1 - (network(p, b, g, latency) + merging(p, b)) / t for p, b, g, t in runs])
    return np.linalg.lstsq(rows, rest, rcond=None)[0], latency


def step_time(constants, latency, processes, batch_size, gbit, worth=1.0, bits=32, late=False):
    """Return t in milliseconds; with ``late``, the next documents are fitted while the network is busy."""
    local = terms(processes, batch_size) @ (constants * [1 / worth, 1 / worth, 1])
    local += merging(processes, batch_size) / worth
    sent = network(processes, batch_size, gbit, latency, bits)
    return float(max(local, sent) if late else local + sent)


def machines(constants, latency, gbit, bits, late, processes, batch_size):
    """Return t for machines of 8 cores."""
    return step_time(constants, latency, processes, batch_size, gbit, CORES, bits, late)


def gpu_step(processes, batch_size):
    """Return t in milliseconds for GPUs: λ whole on each, statistics summed by all of them; bytes over bandwidth.

    Nothing of it was measured on a GPU.

    A round reads the rows of all entries twice, and about 0.6 times as much for the sums by document; a step reads and
    writes λ, the sum and a slot of the window.
    """
    local = batch_size * ENTRIES * ROUNDS * PADDING * READS * ROW_BYTES * 1e-6 / GPU_MEMORY
    step = 10 * VOCABULARY * ROW_BYTES * 1e-6 / GPU_MEMORY
    inside, hosts = min(processes, GPUS_PER_MACHINE), -(-processes // GPUS_PER_MACHINE)
    ways = 2 * VOCABULARY * ROW_BYTES * 1e-6
    sums = ways * ((inside - 1) / inside / GPU_LINK + (hosts - 1) / hosts / (0.95 * 100 / 8))
    return local + LONGEST * LAUNCHES + step + (sums + GPU_LATENCY if processes > 1 else 0.0)


def efficient(time, processes, candidates, wanted=0.8):
    """Return the smallest minibatch per machine with this fraction of the rate of independent machines, or None."""
    return next((b for b in candidates if time(1, b) / time(processes, b) >= wanted), None)


def predict(constants, latency):
    """Print the speed-up of machines of 8 cores, and the minibatch from which they work at 80% of their rate."""
    number = (8, 16, 32, 64, 128, 256)
    candidates = [round(2_400 * 2 ** (i / 4), -2) for i in range(28)]
    print(f"\n| link | B per machine | {' | '.join(f'{p} machines' for p in number)} |\n{'|---' * 8}|")
    least = []
    for name, *link in LINKS:
        time = partial(machines, constants, latency, *link)
        for b in (2_400, 9_600, 38_400):
            print(f"| {name} | {b:,} | {' | '.join(f'{p * time(1, b) / time(p, b):.1f}' for p in number)} |")
        found = [efficient(time, p, candidates) for p in number]
        least.append(f"| {name} | {' | '.join(f'{b:,.0f}' if b else 'none' for b in found)} |")
    print(f"\n| B per machine for 80% | {' | '.join(f'{p} machines' for p in number)} |\n{'|---' * 7}|")
    print("\n".join(least))


def report(constants, latency):
    """Print the fit, the validation and the predictions."""
    d, r, f = constants
    print(
        f"d = {d * 1e3:.2f} µs, r = {r * 1e3:.2f} µs, f = {f:.2f} ms, a = {latency[0]:.3f} ms, b = {latency[1]:.3f} ms"
    )
    print("\n| processes | documents each | link | measured, ms | model, ms | in the fit |\n|---|---|---|---|---|---|")
    for p, b, gbit, measured in MEASURED:
        link = "loopback" if gbit == LOOPBACK else f"{gbit} Gbit/s"
        model = step_time(constants, latency, p, b, gbit)
        print(f"| {p} | {b:,} | {link} | {measured} | {model:.1f} | {'yes' if gbit == LOOPBACK else 'no'} |")
    predict(constants, latency)
    print("\nGPUs, roofline: ms per step and documents/s")
    for p in (1, 8, 64):
        cells = [
            f"B = {b:,}: {gpu_step(p, b):.2f} ms, {p * b / gpu_step(p, b) / 1e3:.1f} M/s" for b in (300, 2_400, 9_600)
        ]
        print(f"  {p} GPU: " + "; ".join(cells))


def draw(constants, latency, path):
    """Draw the speed-up against the number of machines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    processes = 2 ** np.arange(9)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for ax, (name, gbit) in zip(axes, (("10 GbE", 10), ("100 GbE", 100), ("8 GPUs per machine", None)), strict=True):
        for b in (2_400, 9_600, 38_400):

            def time(p, b=b, gbit=gbit):
                return gpu_step(p, b) if gbit is None else machines(constants, latency, gbit, 32, False, p, b)

            ax.plot(processes, [p * time(1) / time(p) for p in processes], "o-", label=f"B = {b:,} each")
        ax.plot(processes, processes, "k:", lw=1)
        ax.set(xscale="log", yscale="log", xlabel="machines" if gbit else "GPUs", title=f"{name} (predicted)")
    axes[0].set_ylabel("speed-up over one")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main():
    """Fit, validate, predict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    constants, latency = fit()
    report(constants, latency)
    if args.plot:
        draw(constants, latency, args.plot)


if __name__ == "__main__":
    main()
