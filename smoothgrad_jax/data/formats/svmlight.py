"""svmlight: one document per line, ``label id:count … # comment``; label, qid and comment are ignored."""

from smoothgrad_jax.data.count_lines import pair_format

FORMAT = pair_format("svmlight", priority=41)
