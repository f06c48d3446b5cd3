"""``smoothgrad demo``: learn topics of the docstrings of the installed Python; needs no download."""

import gzip
import json
import time
from argparse import Namespace
from pathlib import Path

from smoothgrad_jax.app import demo_corpus, report, saved_models, signals
from smoothgrad_jax.app.commands.inputs import provenance
from smoothgrad_jax.app.commands.output import CommandError, log, output_folder, print_topics, size_of
from smoothgrad_jax.app.commands.training import new_run, saved_model, train
from smoothgrad_jax.app.program_cache import cache_folder
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.data import corpus_folder, sources
from smoothgrad_jax.data.durable_files import replacing


def run(args: Namespace) -> int:
    """Train on the docstrings, save the model and write a report."""
    out = Path(args.out)
    with output_folder(out) as names:
        if names and not ("model.json" in names and saved_models.load_model(out).settings.get("demo")):
            raise CommandError(f"{out}: is neither empty nor the folder of a demo; give another folder with --out")
        return _run(args, out)


def _run(args: Namespace, out: Path) -> int:
    start = time.perf_counter()
    source = sources.open_source(_documentation(), field="text", id="name", format="jsonl")
    stored = corpus_folder.read(source)
    settings = Settings(topics=args.topics, seed=args.seed, passes=args.passes).resolve(stored.corpus.num_docs)
    log(f"{size_of(stored)}; {args.topics} topics")
    training = new_run(stored, settings, provenance(stored) | {"demo": True})
    with signals.deferred():
        code = train(training, as_json=False)
        model = saved_model(training, stored)
        saved_models.save_model(out, model)
    typical = report.typical_documents(
        model.transform(stored.corpus), source.texts(), (each.id for each in source.metadata())
    )
    path = report.write_report(out / "report.html", model, documents=typical, title="Topics in Python's documentation")
    with signals.dropping_closed_output():
        print_topics(model, 10)
        print(f"report: {path.resolve().as_uri()}")
        print(f"{time.perf_counter() - start:.0f} s in total; for your own text: smoothgrad fit FILE --out MODEL")
    return code


def _documentation() -> Path:
    """Return the file of docstrings in the user's cache; the first call collects them."""
    path = cache_folder() / f"documentation-{demo_corpus.version()}.jsonl.gz"
    if path.exists():
        return path
    log("collecting the documentation of Python, numpy, scipy and jax …")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=3) as file:
        for name, text in demo_corpus.collect():
            file.write(json.dumps({"name": name, "text": text}) + "\n")
    return path
