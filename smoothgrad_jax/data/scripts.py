"""Scripts that put no spaces between words, which a regular expression cannot split into words."""

import re
import warnings
from collections.abc import Iterable, Iterator

from smoothgrad_jax.data.errors import CorpusWarning, OptionName

_SAMPLE = 1 << 16  # characters from which the script is recognised
# Letters of scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_UNSPACED_FRACTION = 0.2  # of the letters, from which a sample is not split at spaces


def check_script(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; warn if the first ones are in a script that the default ``token_pattern`` does not split."""
    texts = iter(texts)
    head, size = [], 0
    for text in texts:
        head.append(text)
        size += len(text) + 1
        if size >= _SAMPLE:
            break
    sample = "".join(head)[:_SAMPLE]
    others = sum(map(str.isalpha, _UNSPACED.sub("", sample)))
    unspaced = len(_UNSPACED.findall(sample))
    if unspaced > _UNSPACED_FRACTION * (unspaced + others):
        fraction = f"{100 * unspaced / (unspaced + others):.0f} % of the letters"
        problem = f"{fraction} are Chinese, Japanese, Thai or of another script that puts no spaces between words: "
        remedy = "pass a function that splits a text into words as ", OptionName("tokenizer")
        spaced = "; if spaces separate the words already, pass ", OptionName("token_pattern", r"\S+")
        warnings.warn(CorpusWarning(problem, *remedy, *spaced), stacklevel=2)
    yield from head
    yield from texts
