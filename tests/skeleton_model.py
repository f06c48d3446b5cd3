"""A mixture of Poisson distributions: a model file to copy.

Copy this file to ``smoothgrad_jax/models/NAME.py`` and replace the mixture. The test of this file,
``tests/test_skeleton_model.py``, shows what a model can then do.

    π ~ Dirichlet(a),   θ_k ~ Gamma(b, c),   z_n ~ π,   x_n ~ Poisson(θ_z)

    r_nk ∝ exp(E[log π_k] + x_n E[log θ_k] − E[θ_k])
    Ŝ    = (D/B) Σ_n (r_nk,  x_n r_nk,  r_nk)           statistics of weights, shape, rate

| letter  | name                  | shape  | meaning                                    |
|---------|-----------------------|--------|--------------------------------------------|
| λ       | ``params["weights"]`` | [K]    | parameters of q(π), a Dirichlet            |
|         | ``params["shape"]``   | [K]    | parameters of q(θ_k), a Gamma distribution |
|         | ``params["rate"]``    | [K]    |                                            |
| a, b, c | ``prior``             |        | η: the same leaves, as numbers             |
| x       | ``batch``             | [B]    | counts                                     |
| r       | ``info``              | [B, K] | responsibilities                           |
| D, B    | ``num_docs``          |        | points in the data, points per minibatch   |
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln

from smoothgrad_jax.core.types import Array, Numeric, PRNGKey

Params = dict[str, Array]


class PoissonMixture(NamedTuple):
    """The model: a pytree whose leaves are the hyperparameters.

    Attributes:
      a: Prior of the weights.
      b: Prior of the shapes.
      c: Prior of the rates.
      num_docs: D.
    """

    a: Numeric
    b: Numeric
    c: Numeric
    num_docs: Numeric

    # Required: prior and local_step.

    @property
    def prior(self) -> dict[str, Numeric]:
        """η, with the structure of the parameters or a prefix of it."""
        return {"weights": self.a, "shape": self.b, "rate": self.c}

    def local_step(self, params: Params, batch: Array, key: PRNGKey | None = None) -> tuple[Params, Array]:
        """Return the statistics of a minibatch, scaled to the data, and the responsibilities."""
        del key  # this model does not sample
        r = jax.nn.softmax(log_joint(params, batch), axis=1)
        scale = self.num_docs / batch.shape[0]
        return {"weights": scale * r.sum(0), "shape": scale * (batch @ r), "rate": scale * r.sum(0)}, r

    # Optional: held-out scores.

    def split_held_out(self, data: Array, key: PRNGKey | None, params: Params) -> Array:
        """Prepare held-out data once; counts need no preparation."""
        del key, params
        return jnp.asarray(data, jnp.float32)

    def held_out_score(self, params: Params, held_out: Array) -> float:
        """Return nats per held-out count, under the means of the parameters."""
        return float(log_density(params, held_out).mean())


def init_params(num_components: int) -> Params:
    """Return parameters whose components differ; equal components would stay equal."""
    spread = jnp.linspace(0.5, 2.0, num_components)
    return {"weights": jnp.ones(num_components), "shape": 5 * spread, "rate": jnp.ones(num_components)}


def log_joint(params: Params, x: Array) -> Array:
    """Return E[log π_k] + x E[log θ_k] − E[θ_k] [B, K], up to a term per point that cancels in r."""
    shape, rate = params["shape"], params["rate"]
    return digamma(params["weights"]) + x[:, None] * (digamma(shape) - jnp.log(rate)) - shape / rate


def log_density(params: Params, x: Array) -> Array:
    """Return log Σ_k E[π_k] Poisson(x | E[θ_k]) [B]."""
    weights, mean = params["weights"] / params["weights"].sum(), params["shape"] / params["rate"]
    each = jnp.log(weights) + x[:, None] * jnp.log(mean) - mean - gammaln(x[:, None] + 1)
    return jax.nn.logsumexp(each, axis=1)
