"""The optional parts of the model protocol: present, absent, and present but false."""

import math

import jax.numpy as jnp
import pytest
from mixture import local_step
from unigram_mixture import UnigramMixture

from smoothgrad_jax import LDA, Sampled, pack
from smoothgrad_jax.core import model as protocol
from smoothgrad_jax.core.model import as_model
from smoothgrad_jax.core.row_sparse.kernel import RowBatch, RowSparseModel

FUNCTION = as_model(local_step, 1.0)
MIXTURE = UnigramMixture(0.3, 1.0, 80)
VARIATIONAL, SAMPLED = LDA(0.3, 0.2, 50), LDA(0.3, 0.2, 50, method=Sampled())


@pytest.mark.parametrize(
    ("model", "uses_key", "uses_documents", "size"),
    [
        (FUNCTION, False, False, math.nan),
        (MIXTURE, False, True, 80),
        (VARIATIONAL, False, True, 50),
        (SAMPLED, True, True, 50),
    ],
    ids=["function", "mixture", "variational", "sampled"],
)
def test_a_part_that_is_missing_has_its_default(model, uses_key, uses_documents, size):
    assert protocol.uses_key(model) is uses_key
    assert protocol.uses_documents(model) is uses_documents
    assert protocol.data_size(model) == pytest.approx(size, nan_ok=True)


def test_a_model_with_a_check_is_returned_in_the_dtype_of_the_parameters():
    assert protocol.checked(FUNCTION, jnp.ones(3), None) is FUNCTION
    assert protocol.checked(VARIATIONAL, jnp.ones((4, 2), jnp.float32), 4).alpha.dtype == jnp.float32
    with pytest.raises(ValueError, match="the documents have 5 words, but lam has 4 rows"):
        protocol.checked(VARIATIONAL, jnp.ones((4, 2)), 5)


def test_a_packed_batch_has_every_part_of_a_row_batch():
    assert isinstance(MIXTURE, RowSparseModel)
    batch = pack([([0, 2], [1, 1])], num_words=7)
    parts = [name for name in vars(RowBatch) if isinstance(vars(RowBatch)[name], property)]
    assert sorted(parts) == ["num_used", "num_words", "offsets", "size", "vocabulary", "words"]
    assert all(hasattr(batch, name) for name in parts)
    assert batch.num_words == 7
