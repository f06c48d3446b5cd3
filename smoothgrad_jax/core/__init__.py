"""The algorithm of the paper for any conjugate-exponential model and any pytree of parameters."""
