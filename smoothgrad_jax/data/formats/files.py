"""A folder of text files: one document per file, in the order of their names."""

import os
from collections.abc import Iterator

from smoothgrad_jax.data import records, sources
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source


def _texts(source: Source) -> Iterator[str]:
    for path in source.paths:
        for file in sources.files_in(path) if os.path.isdir(path) else [path]:
            yield records.read_text(file, source.encoding)


FORMAT = Format(priority=90, recognise=lambda head: head.is_folder, texts=_texts)
