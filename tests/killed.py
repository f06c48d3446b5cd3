"""A training run that a test kills and restarts.

The process is forked from a server that has imported jax, and the run is small, so that a restart is fast.
"""

import os
import time

import jax
import numpy as np

from smoothgrad_jax import LDA
from smoothgrad_jax.training import driver as training
from smoothgrad_jax.training.checkpoints import Checkpoints, check_same

V, K, D, B = 80, 4, 120, 10
STEPS, EVERY = 100, 2


def live(folder, cache, pipe, pause):
    """Train from the last checkpoint to the end, write checkpoints, and save λ in ``final.npy``.

    Args:
      folder: Folder of the checkpoints.
      cache: Folder for compiled programs.
      pipe: Receives the first step of this process after its first report.
      pause: Delay in seconds before and after every fsync and rename, so that most kills happen during a write.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    os.fsync, os.rename = _slow(os.fsync, pause), _slow(os.rename, pause)
    rng = np.random.default_rng(0)
    X, lam = rng.poisson(0.1, (D, V)), rng.gamma(100, 0.01, (V, K)).astype(np.float32)
    settings = {"steps": STEPS, "batch_size": B}
    checkpoints = Checkpoints(folder)
    last = checkpoints.latest()
    history, first = [], 0
    if last:
        assert not last.damaged  # a renamed checkpoint is always complete
        check_same(last.settings, settings)
        lam, history, first = last.state, last.history, last.step
    key = jax.random.wrap_key_data(np.array([0, 5], np.uint32))
    options = {"window": 5, "rho": 0.1, "batch_size": B, "key": key, "threads": 2, "report_every": EVERY}
    run = training.fit(X, LDA(0.3, 0.2, D), lam, steps=STEPS - first, **options)
    for progress in run:
        if progress.step == first + EVERY:
            pipe.send(first)
        history.append(progress.step)
        checkpoints.write(run, settings, history)
    assert history == list(range(EVERY, STEPS + 1, EVERY))
    np.save(folder.parent / "final.npy", run.params)


def _slow(function, pause):
    def paused(*args):
        time.sleep(pause)
        function(*args)
        time.sleep(pause)

    return paused
