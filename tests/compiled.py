"""Inspection of compiled XLA programs."""


def is_one_piece(compiled):
    """Return whether XLA compiled the loops into one small call, with few other operations in the entry function."""
    entry = compiled.as_text().partition("ENTRY")[2]
    return entry.count("xla_cpu_small_call") == 1 and " while(" not in entry and entry.count(" fusion(") < 5
