"""``smoothgrad convert``: convert a corpus to a folder of memory-mapped arrays."""

import time
from argparse import Namespace
from pathlib import Path

from smoothgrad_jax.app.commands.inputs import open_source, word_options
from smoothgrad_jax.app.commands.output import check_folder, emit, log_dropped, reading_progress, size_of
from smoothgrad_jax.data import corpus_folder


def run(args: Namespace) -> int:
    """Convert the files to a corpus folder."""
    start = time.perf_counter()
    corpus_folder.check_output(args.out, args.overwrite)
    check_folder(Path(args.out))
    source = open_source(args)
    with reading_progress(args.json) as show:
        stored = corpus_folder.convert(
            source, args.out, overwrite=args.overwrite, jobs=args.jobs, progress=show, **word_options(args)
        )
    seconds = time.perf_counter() - start
    log_dropped(stored)
    if args.json:
        emit({"event": "done", "corpus": str(args.out), "seconds": seconds, **stored.manifest})
    else:
        print(f"{args.out}: {size_of(stored)}, {stored.corpus.num_docs / seconds:,.0f} documents/s")
    return 0
