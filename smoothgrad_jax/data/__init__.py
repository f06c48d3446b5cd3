"""Documents and counts: batches, corpora, file formats, text, the corpus folder on disk."""
