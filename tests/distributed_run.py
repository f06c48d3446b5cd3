"""A training run of several processes, for ``test_distributed.py``; each process runs this program.

python tests/distributed_run.py FOLDER STEPS [EVENT STEP PROCESS]

Process PROCESS kills itself, freezes, raises an error or gets SIGTERM after the given step.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from smoothgrad_jax import LDA, Adaptive, Checkpoints, Sampled, distributed, fit

V, K, D, B = 61, 5, 150, 23
EVERY = 3  # steps between two reports, each of which writes a checkpoint


def data():
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(0.2, 1, (D, V))), rng.gamma(100, 0.01, (V, K))


def begin(steps, start=None, **options):
    X, lam = data()
    return fit(
        X,
        LDA(0.3, 0.2, D, method=Sampled(3, 1)),
        lam if start is None else start,
        window=Adaptive(4, 6),
        steps=steps,
        batch_size=B,
        key=jax.random.key(3),
        rho=0.1,
        report_every=EVERY,
        **({"held_out": X[:10], "score_every": 6} | options),
    )


def happen(event):
    {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": lambda: 1 / 0,
        "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }[event]()


def main(folder, steps, event=None, at=0, process=0):
    distributed.start(heartbeat_timeout=3, start_timeout=30)
    folder, number = Path(folder), jax.process_index()
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.latest()
    first = last.step if last else 0
    options = {"held_out": None, "score_every": None} if event else {}
    run = begin(int(steps) - first, last.state if last else None, mesh=distributed.mesh(), **options)
    signal.signal(signal.SIGTERM, lambda *_: run.interrupt())
    scores = []
    try:
        for report in run:
            scores.append(report.score)
            checkpoints.write(run)
            if event and report.step >= int(at) and number == int(process):
                (folder / "event").write_text(str(time.time()))
                happen(event)
    except KeyboardInterrupt:
        scores.append("interrupted")
    lam = np.asarray(run.params)
    found = {"first": first, "step": run.step, "scores": scores, "lam": lam.tolist()}
    (folder / f"result-{number}.json").write_text(json.dumps(found))
    try:
        distributed.check_same({"process": number, "step": run.step})
    except distributed.DifferenceError as error:
        print(error, flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(*sys.argv[1:])
