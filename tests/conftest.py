"""Shared small corpora; everything is generated."""

import os

import numpy as np
import pytest

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs that other processes compiled would hide a defect


@pytest.fixture
def rng():
    return np.random.default_rng(0)


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
