"""A folder of text files: one document per file, in the order of their names, which are the ids."""

import os
from collections.abc import Iterator

from smoothgrad_jax.data import records, sources
from smoothgrad_jax.data.documents import Document, Metadata, encodable
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source


def _documents(source: Source) -> Iterator[Document]:
    assert isinstance(source.loaded, list)
    for file in source.loaded:
        # Names are relative to the folder if there is one folder; in several folders they could be the same.
        name = file.relative_to(source.paths[0]) if len(source.paths) == 1 and file != source.paths[0] else file
        yield Document(records.read_text(file, source.encoding), Metadata(encodable(name.as_posix())))


def _prepare(source: Source) -> Source:
    # The files are listed once: an output in the folder is not a document.
    files = [file for path in source.paths for file in (sources.files_in(path) if os.path.isdir(path) else [path])]
    return source._replace(id="file name", loaded=files)


FORMAT = Format(priority=90, recognise=lambda head: head.is_folder, documents=_documents, prepare=_prepare)
