"""``smoothgrad convert``: write a corpus folder, from which training does not load the corpus into memory."""

import os
import time
from argparse import Namespace

from smoothgrad_jax.app.commands.inputs import open_source, word_options
from smoothgrad_jax.app.commands.output import CommandError, emit, reading_progress, say_dropped, size_of
from smoothgrad_jax.data import corpus_folder


def run(args: Namespace) -> int:
    """Convert the files to a corpus folder."""
    if os.path.lexists(args.out) and not args.overwrite:
        raise CommandError(f"{args.out}: exists already; give another name, or --overwrite to replace a corpus folder")
    start, source = time.perf_counter(), open_source(args)
    with reading_progress(args.json) as show:
        stored = corpus_folder.convert(
            source, args.out, overwrite=args.overwrite, jobs=args.jobs, progress=show, **word_options(args)
        )
    seconds = time.perf_counter() - start
    say_dropped(stored)
    if args.json:
        emit({"event": "done", "corpus": str(args.out), "seconds": seconds, **stored.manifest})
    else:
        print(f"{args.out}: {size_of(stored)}, {stored.corpus.num_docs / seconds:,.0f} documents/s")
    return 0
