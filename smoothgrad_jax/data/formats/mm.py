"""Matrix Market: coordinate, integer, real or pattern, general; one document per row, numbered from 1."""

from smoothgrad_jax.data import count_lines
from smoothgrad_jax.data.count_lines import triplet_format

FORMAT = triplet_format(20, lambda head: head.text[:14].lower() == b"%%matrixmarket", count_lines.read_mm_header)
