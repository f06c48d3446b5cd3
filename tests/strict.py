"""Call every public function once in jax's strictest modes; test_conventions runs this in its own process."""

import math

import jax
import numpy as np
from jax.tree_util import Partial

import smoothgrad_jax as sg

assert jax.config.jax_numpy_rank_promotion == "raise"
assert jax.config.jax_numpy_dtype_promotion == "strict"

rng = np.random.default_rng(0)
X = rng.poisson(0.3, (60, 50))
lam = sg.init_topics(jax.random.key(0), 50, 5)
batch, batches = sg.pack(X), sg.pack(X, rng.integers(0, 60, (4, 10)))
model = sg.LDA(0.1, 0.1, 60)
step = Partial(sg.local_step, model)

for each in (model, sg.LDA(np.full(5, 0.1), np.full((50, 1), 0.1), 60)):
    stats, _ = sg.local_step(each, lam, batch)
    sg.elbo(each, lam, batch)
    sg.log_predictive(each, lam, batch, batch)
sg.topics(lam)
sg.dirichlet.kl_divergence(lam, 0.1)
sg.dirichlet.digamma(lam)
for warmup in ("mean", "zeros"):
    for state in (sg.init(lam, 3), sg.init(lam, 0), sg.init(lam, sg.Exponential())):
        sg.global_step(state, stats, 0.1, 0.1, math.inf, warmup=warmup)
        sg.averaged_step(state, stats, 0.1, 0.1, math.inf, warmup=warmup)
sg.run(step, sg.init(lam, 3), batches, 0.1, sg.robbins_monro(2, 0.7), 2)
sg.sweep(step, lam, batches, 0.1, 0.1, [1, 3, math.inf])
sg.adaptive.push(sg.adaptive.init(sg.Adaptive(8), sg.adaptive.sketch(lam)), sg.adaptive.sketch(stats))
for update in (sg.global_step, sg.averaged_step):
    measured, _ = sg.bias_variance(step, sg.init(lam, 3), batches, batch, 0.1, 0.1, 2, update=update)
    sg.bias_variance(step, measured, batches, batch, 0.1, 0.1, 2, update=update, donate=True)
optimiser = sg.smoothed_svi(3, 0.1, 0.1)
optimiser.update(stats, optimiser.init(lam), lam)
