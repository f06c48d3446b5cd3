"""UCI bag of words: three lines with the numbers D, V and of entries; then lines ``document word count``, from 1."""

from smoothgrad_jax.data import count_lines
from smoothgrad_jax.data.count_lines import NUMBER, triplet_format
from smoothgrad_jax.data.sources import Head


def _recognise(head: Head) -> bool:
    lines = head.lines
    if len(lines) < 3 or not all(line.isdigit() for line in lines[:3]):
        return False
    return len(lines) == 3 or [bool(NUMBER.fullmatch(token)) for token in lines[3].split()] == [True] * 3


FORMAT = triplet_format(30, _recognise, count_lines.read_uci_header)
