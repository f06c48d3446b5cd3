"""What tests read from a compiled program."""


def is_one_piece(compiled):
    """Whether XLA made one function of the loops, and hands out little else: it says so in an attribute of the call."""
    entry = compiled.as_text().partition("ENTRY")[2]
    return entry.count("xla_cpu_small_call") == 1 and " while(" not in entry and entry.count(" fusion(") < 5
