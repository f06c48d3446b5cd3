"""Models: each is one file or folder behind the protocol of :mod:`smoothgrad_jax.core.model`."""
