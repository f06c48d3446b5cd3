"""Sequences of words that belong together, such as "new york", selected by mutual information."""

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt


def collocations(
    words: Callable[[], Iterable[str]],
    frequency: npt.NDArray,
    total: npt.NDArray,
    min_df: float,
    min_npmi: float,
    ngram_range: tuple[int, int],
) -> npt.NDArray[np.bool_]:
    """Select the sequences of words whose words occur together more often than by chance.

    With n(g) the number of occurrences of a word or a sequence g in the corpus, and N the number of words, the
    normalised pointwise mutual information of two neighbours a and b is

        NPMI(a, b) = ln(n(ab) N / (n(a) n(b))) / ln(N / n(ab))        from −1 to 1; 0 if they are independent

    (Bouma 2009). The score of a sequence g is the minimum of NPMI(a, b) over the places where g can be divided into
    a and b, so that "new york said" has a low score.

    Args:
      words: Yields all words and sequences, also shorter ones than are kept; the words are joined by a space.
      frequency, total: Their document frequencies, and n.
      min_df, min_npmi: The minimal document frequency, a number of documents, and the minimal score of a sequence.
      ngram_range: The shortest and the longest sequence to keep.

    Returns:
      Whether each sequence is kept. Single words are kept if ``ngram_range`` starts with 1.
    """
    shortest, longest = ngram_range
    often = frequency >= min_df
    counts, num_words = {}, 0
    for word, n, candidate in zip(words(), total, often, strict=True):
        length = word.count(" ") + 1
        num_words += int(n) if length == 1 else 0
        if candidate and length < longest:  # the parts of a frequent sequence are frequent
            counts[word] = int(n)

    def score(parts: list[str], n: int) -> float:
        pairs = [(" ".join(parts[:i]), " ".join(parts[i:])) for i in range(1, len(parts))]
        if n >= num_words or not all(a in counts and b in counts for a, b in pairs):
            return 1  # a token that contains a space is not a sequence
        return min(math.log(n * num_words / (counts[a] * counts[b])) for a, b in pairs) / math.log(num_words / n)

    kept = np.zeros(len(frequency), np.bool_)
    positions = np.flatnonzero(often)
    for i, word in zip(positions, itertools.compress(words(), often), strict=True):
        parts = word.split(" ")
        enough = len(parts) == 1 or score(parts, int(total[i])) >= min_npmi
        kept[i] = enough and len(parts) >= shortest
    return kept
