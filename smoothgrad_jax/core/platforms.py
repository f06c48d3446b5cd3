"""On which platform arrays are: CPU, GPU or TPU. Asked outside compiled programs, to choose between them."""

import jax

from smoothgrad_jax.core.types import PyTree


def platform_of(tree: PyTree) -> str | None:
    """Return the platform of the first jax array in a pytree, such as ``"cpu"``; without one, the default platform.

    NumPy arrays enter a compiled program on the default platform. A traced array has no platform yet: None.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        return None
    if arrays:
        return next(iter(arrays[0].devices())).platform
    return default_platform()


def default_platform() -> str:
    """Return the platform on which jax computes unless it is told otherwise."""
    default = jax.config.values["jax_default_device"]
    return jax.default_backend() if default is None else getattr(default, "platform", default)
