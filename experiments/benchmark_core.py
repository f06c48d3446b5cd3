"""Measure the core: the window, the global step, the local step, the import.

    python experiments/benchmark_core.py

Programs that are compared run interleaved in one process; the median over the rounds is printed with the minimum. The
local step and scikit-learn's E-step (``pip install scikit-learn``) run on the same pinned core.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time

V, K, B = 8_000, 100, 300


def interleave(programs, rounds):
    """Return seconds per call, {name: [rounds]}; the programs alternate, so that noise affects all of them."""
    times = {name: [] for name in programs}
    for program in programs.values():
        program()
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return times


def show(times, scale=1.0):
    """Print milliseconds; return the medians."""
    medians = {}
    for name, seconds in times.items():
        ordered = sorted(seconds)
        medians[name] = ordered[len(ordered) // 2] / scale * 1e3
        print(f"  {name:<44}{medians[name]:>9.2f} ms   (minimum {ordered[0] / scale * 1e3:.2f})")
    return medians


def global_steps(rounds):
    """Compare capacity 1 with 100, in single steps and in a scan; compare four windows under vmap with four steps."""
    import jax
    import jax.numpy as jnp

    from smoothgrad_jax import global_step, init
    from smoothgrad_jax.core import svi

    stats = jax.random.gamma(jax.random.key(0), 0.3, (V, K))
    step = jax.jit(global_step, donate_argnums=0)

    def repeat(function, state):
        holder = [state]

        def program():
            holder[0] = jax.block_until_ready(function(holder[0]))

        return program

    def single(length):
        return repeat(lambda state: step(state, stats, 0.5, 0.01, length), init(jnp.ones((V, K)), length))

    scanned_steps = 50

    @jax.jit
    def scanned(state, length):
        def body(state, scale):
            return global_step(state, scale * stats, 0.5, 0.01, length), None

        return jax.lax.scan(body, state, jnp.linspace(0.5, 1.5, scanned_steps))[0]

    scan = jax.jit(scanned, donate_argnums=0)

    def in_scan(length):
        return repeat(lambda state: scan(state, length), init(jnp.ones((V, K)), length))

    lengths, axes = [1, 3, 10, 30], svi.vmap_axes()
    together = jax.jit(
        jax.vmap(
            lambda state, s, length: global_step(state, s, 0.5, 0.01, length), in_axes=(axes, 0, 0), out_axes=axes
        ),
        donate_argnums=0,
    )
    each_stats, each_length = jnp.stack([stats] * 4), jnp.array(lengths)
    states = jax.vmap(lambda _: init(jnp.ones((V, K)), 30), out_axes=axes)(jnp.arange(4))
    separate = [single(length) for length in lengths]

    def one_by_one():
        for program in separate:
            program()

    print(f"\nglobal_step, V = {V:,}, K = {K}, {rounds} rounds")
    alone = show(interleave({f"capacity {c}": single(c) for c in (1, 100)}, rounds))
    print(f"  in lax.scan, {scanned_steps} steps per call")
    inside = show(interleave({f"capacity {c}": in_scan(c) for c in (1, 100)}, max(rounds // 10, 3)), scanned_steps)
    print("  windows of 1, 3, 10 and 30")
    vmap = show(
        interleave(
            {
                "four steps": one_by_one,
                "one step under vmap": repeat(lambda s: together(s, each_stats, each_length), states),
            },
            rounds,
        )
    )
    return {
        "capacity 100 / capacity 1": alone["capacity 100"] / alone["capacity 1"],
        "the same in scan": inside["capacity 100"] / inside["capacity 1"],
        "vmap / four steps": vmap["one step under vmap"] / vmap["four steps"],
    }


def local_steps(rounds):
    """Compare the local step with scikit-learn's, both with the topics that generated the documents."""
    import jax
    import numpy as np
    import scipy.sparse
    from sklearn.decomposition._lda import _update_doc_distribution
    from sklearn.decomposition._online_lda_fast import _dirichlet_expectation_2d

    from smoothgrad_jax import LDA, local_step, pack

    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, V + 1) ** 0.8
    beta = rng.gamma(0.1, 1, (K, V)) * frequency + 1e-12
    beta /= beta.sum(1, keepdims=True)
    theta = rng.dirichlet(np.full(K, 0.1), B)
    counts = np.array([rng.multinomial(104, p) for p in theta @ beta])
    lam = (0.1 + 2_000 * beta.T).astype(np.float32)
    X = scipy.sparse.csr_matrix(counts.astype(np.float32))
    exp_log_beta = np.exp(_dirichlet_expectation_2d(lam.T.copy()))
    model, batch = LDA(0.1, 0.1, B), pack(X)
    device_lam, device_batch = jax.device_put((lam, batch))

    def ours():
        return jax.block_until_ready(local_step(model, device_lam, device_batch, 1e-3, 100))

    def theirs():
        return _update_doc_distribution(X, exp_log_beta, 0.1, 100, 1e-3, True, None)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    start = time.perf_counter()
    _, info = ours()
    compiled = time.perf_counter() - start
    print(f"\nlocal_step, {B} documents of {X.nnz / B:.0f} distinct words, V = {V:,}, K = {K}, cores: {cores}")
    print(f"  {float(info.iterations.mean()):.1f} iterations per document; compilation took {compiled:.1f} s")
    medians = show(interleave({"local_step": ours, "scikit-learn _update_doc_distribution": theirs}, rounds))
    return {"scikit-learn / local_step": medians["scikit-learn _update_doc_distribution"] / medians["local_step"]}


def import_time(rounds):
    """Measure what the import of the package adds to the import of jax and optax."""
    program = (
        "import time, jax, optax; start = time.perf_counter(); "
        "import smoothgrad_jax; print(time.perf_counter() - start)"
    )
    seconds = sorted(float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(rounds))
    print(f"\nimport smoothgrad_jax after jax and optax: {seconds[rounds // 2]:.3f} s (median of {rounds})")
    return {"import, seconds": seconds[rounds // 2]}


PARTS = {"global": (global_steps, 100), "local": (local_steps, 10), "import": (import_time, 5)}


def main():
    """Run each part in its own process and collect the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--all-cores", action="store_true", help="do not pin the local step to one core")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "local" in args.parts and importlib.util.find_spec("sklearn") is None:
        parser.error("the local part needs scikit-learn: pip install '.[test]', or name other parts")
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}")
    if args.json:
        function, rounds = PARTS[args.parts[0]]
        if function is local_steps and not args.all_cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # must precede the start of jax's threads
        print("RESULT " + json.dumps(function(rounds)), flush=True)
        return
    import jax

    print(f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    ratios = {}
    for part in args.parts:
        output = subprocess.run(
            [sys.executable, __file__, part, "--json", *(["--all-cores"] if args.all_cores else [])],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        *lines, result = output.stdout.rstrip().split("\n")
        print("\n".join(lines), flush=True)
        ratios |= json.loads(result.removeprefix("RESULT "))
    print()
    for name, ratio in ratios.items():
        print(f"{name:<46}{ratio:>9.2f}")


if __name__ == "__main__":
    main()
