"""The model protocol: everything that training, checkpoints, sweeps and diagnostics know about a model.

A function ``(params, batch) -> (statistics, info)`` and a prior are enough for research code; :class:`FunctionModel`
wraps them. A model class adds what it can do beyond that. Each further part of the protocol is optional. A caller that
needs a missing part says so in an error that names the method.

| part                  | protocol                | needed for                                                        |
|-----------------------|-------------------------|-------------------------------------------------------------------|
| ``prior``             | :class:`Model`          | every global step                                                 |
| ``local_step``        | :class:`Model`          | every engine                                                      |
| ``num_docs``          | :class:`SizedModel`     | progress and limits in passes where the caller supplies the       |
|                       |                         | batches; without it they are NaN and an error                     |
| ``uses_documents``    | :class:`DocumentModel`  | if true, ``fit`` draws minibatches of documents from a corpus     |
| ``uses_key``          | :class:`SamplingModel`  | if true, the local step gets a random key per step, and a run     |
|                       |                         | needs a key                                                       |
| ``check``             | :class:`CheckingModel`  | errors before the first step, and hyperparameters in the dtype of |
|                       |                         | the parameters                                                    |
| ``split_held_out``,   | :class:`ScoringModel`   | held-out scores during training, unless ``fit`` is given another  |
| ``held_out_score``    |                         | score                                                             |
| ``for_platform``,     | :class:`PlatformModel`  | a local step for accelerators besides the one for CPUs            |
| ``is_batched``        |                         |                                                                   |
| ``row_kernel``, …     | ``RowSparseModel``      | the row-sparse engine; without it the model runs on the dense     |
|                       |                         | engine. See :mod:`smoothgrad_jax.core.row_sparse.kernel`          |

A model is a pytree whose leaves are its hyperparameters, so that compiled programs take them as inputs. A model with
other hyperparameters of the same shapes compiles nothing again.
"""

import math
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import LocalStep, Numeric, PRNGKey, PyTree

_AnyModel = TypeVar("_AnyModel", bound="Model")


@runtime_checkable
class Model(Protocol):
    """A conjugate-exponential model with its hyperparameters."""

    @property
    def prior(self) -> PyTree:
        """η: natural parameters of the prior, a pytree prefix of the parameters."""

    def local_step(self, params: PyTree, batch: PyTree, key: PRNGKey | None = None) -> tuple[PyTree, PyTree]:
        """Fit the local variables of a minibatch with the global parameters held fixed.

        Args:
          params: λ.
          batch: One minibatch.
          key: A random key for models that sample; a function of (seed, step). Other models ignore it.

        Returns:
          ``(statistics, info)``: expected sufficient statistics scaled to the full data, with the structure of
          ``params``; and anything a reader may want to see.
        """


@runtime_checkable
class SizedModel(Model, Protocol):
    """A model that knows the size of the data that minibatches represent."""

    @property
    def num_docs(self) -> Numeric:
        """D, the number of documents, or data points, to which statistics are scaled."""


@runtime_checkable
class DocumentModel(Model, Protocol):
    """A model that may learn from documents, which ``fit`` draws from a corpus."""

    @property
    def uses_documents(self) -> bool:
        """Whether a batch is a :class:`smoothgrad_jax.Batch` of documents."""


@runtime_checkable
class SamplingModel(Model, Protocol):
    """A model that may sample in its local step."""

    @property
    def uses_key(self) -> bool:
        """Whether the local step needs a random key."""


@runtime_checkable
class PlatformModel(Model, Protocol):
    """A model with a local step for accelerators, in which all data points of a minibatch advance together."""

    @property
    def is_batched(self) -> bool:
        """Whether the local step is the one for accelerators."""

    def for_platform(self, platform: str) -> Self:
        """Return the model with the local step for a platform, such as ``"cpu"`` or ``"gpu"``.

        Raises:
          OptionError: The model was told to use the local step for CPUs, and this is none.
        """


@runtime_checkable
class CheckingModel(Model, Protocol):
    """A model that checks its hyperparameters and the parameters before the first step."""

    def check(self, params: PyTree, num_words: int | None) -> Self:
        """Return the model with hyperparameters in the dtype of the parameters.

        Args:
          params: Parameters to start from, or their shapes.
          num_words: V of the corpus, if known.

        Raises:
          ValueError: The parameters do not belong to the model, or cannot start a run.
        """


@runtime_checkable
class ScoringModel(Model, Protocol):
    """A model that scores held-out data."""

    def split_held_out(self, data: PyTree, key: PRNGKey | None, params: PyTree) -> PyTree:
        """Prepare held-out data once, and check it against the shapes of the parameters.

        Args:
          data: What the caller of :func:`smoothgrad_jax.fit` gave.
          key: Random key of the run.
          params: Parameters, or their shapes.
        """

    def held_out_score(self, params: PyTree, held_out: PyTree) -> float:
        """Return the score of prepared held-out data; higher is better."""


class FunctionModel(NamedTuple):
    """A model that is a function and a prior; made by :func:`as_model`.

    Attributes:
      function: ``(params, batch) -> (statistics, info)``, as a ``jax.tree_util.Partial``, whose arguments are inputs of
        the compiled program.
      prior: η, a pytree prefix of the parameters.
    """

    function: LocalStep
    prior: PyTree

    def local_step(self, params: PyTree, batch: PyTree, key: PRNGKey | None = None) -> tuple[PyTree, PyTree]:
        """Call the function."""
        del key
        return self.function(params, batch)


class HeldOut(NamedTuple):
    """Held-out data as two halves of the same documents.

    Attributes:
      observed: The halves that the model sees.
      held_out: The halves that are scored.
    """

    observed: PyTree
    held_out: PyTree


def as_model(model: Model | LocalStep, prior: PyTree | None = None) -> Model:
    """Return a model, from a model or from a function and its prior.

    Raises:
      ValueError: A function without a prior, a model with one, or neither.
    """
    if isinstance(model, Model):
        if prior is not None:
            raise ValueError(f"{type(model).__name__} carries its prior; leave prior out")
        return model
    if not callable(model):
        raise ValueError(
            f"expected a model or a function (params, batch) -> (statistics, info), got {type(model).__name__}"
        )
    if prior is None:
        raise ValueError("a model that is a function needs its prior: give prior=")
    is_partial = isinstance(model, jax.tree_util.Partial)
    return FunctionModel(model if is_partial else jax.tree_util.Partial(model), prior)


def local_step(model: Model, params: PyTree, batch: PyTree, key: PRNGKey | None) -> tuple[PyTree, PyTree]:
    """Return the statistics and the info of a minibatch; raise an error if the model returns anything else."""
    result = model.local_step(params, batch, key)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"local_step must return (stats, info), got {type(result).__name__}")
    return result


def broadcast_prior(prior: PyTree, params: PyTree) -> PyTree:
    """Return η with the structure, shapes and dtypes of λ; a leaf of η may stand for a subtree of λ."""

    def broadcast(eta, subtree):
        return jax.tree.map(lambda lam: jnp.broadcast_to(jnp.asarray(eta, lam.dtype), lam.shape), subtree)

    return jax.tree.map(broadcast, prior, params)


def uses_key(model: Model) -> bool:
    """Return whether the local step of a model needs a random key."""
    return isinstance(model, SamplingModel) and bool(model.uses_key)


def uses_documents(model: Model) -> bool:
    """Return whether the minibatches of a model are documents of a corpus."""
    return isinstance(model, DocumentModel) and bool(model.uses_documents)


def for_platform(model: _AnyModel, platform: str | None) -> _AnyModel:
    """Return the model with the local step for a platform, if it has several and the platform is known."""
    return model.for_platform(platform) if isinstance(model, PlatformModel) and platform is not None else model


def is_batched(model: Model) -> bool:
    """Return whether the local step of a model is one for accelerators, which it has besides the one for CPUs."""
    return isinstance(model, PlatformModel) and bool(model.is_batched)


def data_size(model: Model) -> float:
    """Return D, the number of documents that the minibatches of a model represent; NaN if not known."""
    return float(model.num_docs) if isinstance(model, SizedModel) else math.nan


def checked(model: _AnyModel, params: PyTree, num_words: int | None) -> _AnyModel:
    """Return the model in the dtype of the parameters, if it can check them; else the model as it is."""
    return model.check(params, num_words) if isinstance(model, CheckingModel) else model


def check_key(model: Model, key: PRNGKey | None) -> None:
    """Raise an error if a model samples and there is no random key, or if the key is a number."""
    if key is not None and not hasattr(key, "dtype"):
        raise OptionError("key", f"must be a random key such as jax.random.key(0), got {key!r}")
    if key is None and uses_key(model):
        raise OptionError("key", f"is needed, because {type(model).__name__} samples: key=jax.random.key(0)")
