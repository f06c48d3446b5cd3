"""Plain text: one document per line that is not blank. A file that no other format recognises is plain text."""

from collections.abc import Iterator

from smoothgrad_jax.data import records
from smoothgrad_jax.data.compressed_files import text_lines
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source


def _texts(source: Source) -> Iterator[str]:
    for path in source.paths:
        for _, text in text_lines(path, source.encoding, records.MAX_TEXT_BYTES):
            if text and not text.isspace():
                yield text


FORMAT = Format(priority=100, recognise=lambda head: not head.is_folder, texts=_texts)
