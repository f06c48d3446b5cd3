"""Shared small corpora; everything is generated."""

import os

import numpy as np
import pytest

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs that other processes compiled would hide a defect


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def quick_environment(tmp_path_factory):
    """The environment of processes that compile with little optimisation, and share what they have compiled."""
    from smoothgrad_jax.core._xla import BEFORE_JAX_0_12

    return os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "0" if BEFORE_JAX_0_12 else "1",  # it would reject stored programs
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
    }


@pytest.fixture
def x64():
    """Run a test in float64."""
    import jax

    with jax.enable_x64(True):
        yield


def random_documents(rng, num_docs, num_words, longest=20, shortest=0):
    """Documents with some words repeated, as (ids, counts)."""
    documents = []
    for _ in range(num_docs):
        n = int(rng.integers(shortest, longest + 1))
        words = np.sort(rng.choice(num_words, min(n, num_words), replace=False))
        documents.append((words, rng.integers(1, 5, words.size).astype(np.float64)))
    return documents


@pytest.fixture
def make_documents(rng):
    def make(num_docs, num_words, longest=20, shortest=0):
        return random_documents(rng, num_docs, num_words, longest, shortest)

    return make
