"""Plain text: one document per line. A file that no other format recognises is plain text."""

from collections.abc import Iterator

from smoothgrad_jax.data import records
from smoothgrad_jax.data.compressed_files import text_lines
from smoothgrad_jax.data.documents import Document
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source


def _documents(source: Source) -> Iterator[Document]:
    for path in source.paths:
        for _, text in text_lines(path, source.encoding, records.MAX_TEXT_BYTES):
            yield Document(text)  # also of a blank line, so that document d is line d + 1


FORMAT = Format(priority=100, recognise=lambda head: not head.is_folder, documents=_documents)
