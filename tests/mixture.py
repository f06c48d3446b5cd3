"""A second conjugate model, written as a user would: a mixture of Poisson distributions.

π ~ Dirichlet(a), rate_k ~ Gamma(b, c), z_n ~ π, x_n ~ Poisson(rate_z). The natural parameters are a dict of arrays.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma

PRIOR = {"weights": 1.0, "shape": 1.0, "rate": 0.1}


def local_step(num_points, params, x):
    """Expected statistics of a minibatch of counts [B], scaled to ``num_points``."""
    weights, shape, rate = params["weights"], params["shape"], params["rate"]
    log_rate, mean_rate = digamma(shape) - jnp.log(rate), shape / rate
    logits = digamma(weights) - digamma(weights.sum()) + x[:, None] * log_rate - mean_rate
    r = jax.nn.softmax(logits, axis=1)
    scale = num_points / x.shape[0]
    stats = {"weights": scale * r.sum(0), "shape": scale * (x @ r), "rate": scale * r.sum(0)}
    return stats, {"mean_rate": mean_rate}


def start(num_components):
    spread = jnp.linspace(0.5, 2.0, num_components)
    return {"weights": jnp.ones(num_components), "shape": 5 * spread, "rate": jnp.ones(num_components)}
