"""LDA-C: one document per line, ``N id:count …`` with N pairs."""

from smoothgrad_jax.data.count_lines import pair_format

FORMAT = pair_format("ldac", priority=40)
