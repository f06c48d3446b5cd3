"""What the commands do: from files to topics, and from topics to files.

Each command is a function of its arguments (:mod:`smoothgrad_jax.app.cli`) that returns an exit code. What was asked
for
goes to the standard output, what happens on the way to the standard error.
"""

import gzip
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from smoothgrad_jax.app import demo_corpus as docstrings
from smoothgrad_jax.app import progress, report, runs, saved
from smoothgrad_jax.app.runs import Run, provenance, record
from smoothgrad_jax.data import batches as documents
from smoothgrad_jax.data import readers, store
from smoothgrad_jax.models.lda import inference
from smoothgrad_jax.training.engines import NotFiniteError

INTERRUPTED = 130
_SHOWN = 20  # topics that fit prints at the end
_ALMOST_NOTHING = 0.05  # of the share that a topic would have, were all equal


class CommandError(Exception):
    """What cannot be done, in one line for the user."""


def run(args: Any) -> int:
    """Do what the arguments ask for; every complaint is one line on the standard error."""
    command = {
        "demo": demo,
        "fit": fit,
        "topics": topics,
        "transform": transform,
        "score": score,
        "sweep": sweep,
        "report": write_report,
        "convert": convert,
    }[args.command]
    try:
        return command(args)
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing is to be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CommandError, ValueError, OSError) as error:  # CorpusError, LoadError and SaveError are among them
        print(f"smoothgrad {args.command}: {_options_in(str(error))}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"smoothgrad {args.command}: out of memory: {error}", file=sys.stderr)
        return 1


def _options_in(message):
    """What the library calls its arguments, as the command calls its options."""
    message = re.sub(r"\boverwrite=True\b", "--overwrite", message)
    names = "min_df|max_df|max_features|token_pattern|stop_words|first_id|encoding|field|sort|alpha|eta|tau|kappa"
    return re.sub(rf"\b({names})(?==| must)", lambda found: "--" + found[1].replace("_", "-"), message)


def convert(args: Any) -> int:
    """Files → corpus folder."""
    begun, source = time.perf_counter(), _source(args)
    with _counting(args.json) as show:
        stored = store.convert(
            source, args.out, overwrite=args.overwrite, jobs=args.jobs, progress=show, **_word_options(args)
        )
    seconds = time.perf_counter() - begun
    _say_dropped(stored.manifest)
    if args.json:
        _emit({"event": "done", "corpus": str(args.out), "seconds": seconds, **stored.manifest})
    else:
        print(f"{args.out}: {_size(stored)}, {stored.corpus.num_docs / seconds:,.0f} documents/s")
    return 0


def fit(args: Any) -> int:
    """Corpus → model, with checkpoints on the way."""
    out = Path(args.out)
    checkpoints = saved.Checkpoints(out / "checkpoints")
    last = _last_checkpoint(out, checkpoints, args)
    stored = _open(args, last)
    settings = _settings(args, stored, last)
    run = Run(stored, settings, last, args.threads)
    _say(f"{_size(stored)}; {settings['topics']} topics, window {settings['window']}")
    if args.overwrite and not args.resume:
        checkpoints.clear()
        (out / "report.html").unlink(missing_ok=True)  # it is of the model that goes
    if last and run.step >= run.steps:
        _say(f"{out}: {run.step:,} steps were taken already, and {run.steps:,} are asked for; more --passes go on")
    code = _train(run, args.json, checkpoints, args.checkpoint_every or None)
    model = run.model()
    saved.save_model(out, model)
    if args.json:
        state = {0: "done", INTERRUPTED: "interrupted"}.get(code, "failed")
        last = run.history[-1] if run.history else {}
        _emit({"event": state, "model": str(out)} | last | {"step": run.step})
    else:
        _print_topics(model, 10, _SHOWN)
        print(f"model: {out}")
        print(f"picture: smoothgrad report {out}")
    if code == INTERRUPTED:
        _say(f"interrupted at step {run.step:,} of {run.steps:,}; go on with the same command and --resume")
    return code


def topics(args: Any) -> int:
    """Model → its topics, the largest first."""
    model = saved.load_model(args.model)
    if args.json:
        words, share = model.top_words(args.words), model.shares()
        for k in np.argsort(-share, kind="stable").tolist():
            _emit({"topic": k, "share": float(share[k]), "words": [{"word": w, "p": p} for w, p in words[k]]})
    else:
        _print_topics(model, args.words, everything=args.all)
    return 0


def transform(args: Any) -> int:
    """Model and documents → topic proportions."""
    model = saved.load_model(args.model)
    parts, first = _aligned(args, model), 0
    with _table(args.out, [f"topic {k}" for k in range(model.lam.shape[1])], "theta") as write:
        for part in parts:
            theta = model.transform(part)
            write(first, theta)
            first += len(theta)
    if args.out:
        print(f"{args.out}: {first:,} documents")
    return 0


def score(args: Any) -> int:
    """Model and documents → nats per held-out word by document completion."""
    model = saved.load_model(args.model)
    parts, found, first = _aligned(args, model), [], 0
    with _table(args.out, ["log_prob", "words"], "scores") if args.out else _nothing() as write:
        for part in parts:
            each = inference.completion(model.lda(), model.lam, part)
            write(first, np.stack(each, 1))
            first += len(each.words)
            found.append(each)
    total = inference.Completion(*map(np.concatenate, zip(*found, strict=True)))
    if math.isnan(total.score):
        raise CommandError("no document has two words that the model knows: there is nothing to predict")
    result = {
        "score": total.score,
        "perplexity": total.perplexity,
        "documents": first,
        "held_out_words": float(total.words.sum()),
    }
    if args.json:
        _emit(result)
    else:
        print(f"{total.score:.4f} nats per word, perplexity {total.perplexity:,.1f}")
        print(f"half of the words of each of {first:,} documents, {total.words.sum():,.0f} words, from the other half")
    return 0


def sweep(args: Any) -> int:
    """Several windows on the same minibatches → their held-out curves."""
    out, stored = Path(args.out), _open(args)
    if (out / "sweep.json").exists():
        raise CommandError(f"{out}: there are curves already; give another folder")
    settings = _settings(args, stored)
    if not settings["held_out"]:
        raise CommandError("a sweep compares held-out scores: give --held-out at least 1")
    side_by_side = [Run(stored, settings | {"window": window}, None, args.threads) for window in args.windows]
    _say(f"{_size(stored)}; {settings['topics']} topics, windows {', '.join(map(str, args.windows))}")
    out.mkdir(parents=True, exist_ok=True)
    if not args.json:
        print("passes" + "".join(f"{f'L = {window}':>12}" for window in args.windows))
    code = 0
    try:
        # All windows advance together: what stands in a line compares equals.
        scores = [(report for report in run.reports() if report.score is not None) for run in side_by_side]
        for line in zip(*scores, strict=True):
            if args.json:
                for window, each in zip(args.windows, line, strict=True):
                    _emit({"event": "score", "window": str(window), **record(each)})
            else:
                print(f"{line[0].passes:6.2f}" + "".join(f"{each.score:12.4f}" for each in line), flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except NotFiniteError as error:
        _say(str(error))
        code = 1
    curves = {str(window): run.history for window, run in zip(args.windows, side_by_side, strict=True)}
    (out / "sweep.json").write_text(json.dumps({"settings": settings, "curves": curves}, indent=1))
    number = min(map(len, curves.values()))  # of scores that all have
    if not number:
        _say("it ended before the first score")
        return code
    score, best = max((curve[number - 1]["score"], window) for window, curve in curves.items())
    picture = _draw(out / "sweep.png", curves)
    if args.json:
        state = {0: "done", INTERRUPTED: "interrupted"}.get(code, "failed")
        _emit({"event": state, "best_window": best, "score": score})
    else:
        print(f"best at the end: L = {best}, {score:.4f}")
        print(f"curves: {out / 'sweep.json'}" + (f", {picture}" if picture else ""))
    return code


def write_report(args: Any) -> int:
    """Model (and the documents it is of) → one HTML file."""
    model = saved.load_model(args.model)
    typical = None
    if args.inputs:
        source = _source(args)
        theta = np.concatenate([model.transform(part) for part in _aligned(args, model)])
        typical = report.typical_documents(theta, _texts(source, model))
    path = Path(args.out) if args.out else Path(args.model) / "report.html"
    report.write_report(path, model, documents=typical, title=args.title)
    print(path)
    return 0


def demo(args: Any) -> int:
    """The documentation of the Python that runs this → topics and a report."""
    out, begun = Path(args.out), time.perf_counter()
    if out.exists() and not ((out / "model.json").exists() and saved.load_model(out).settings.get("demo")):
        raise CommandError(f"{out}: it exists, and is not of an earlier demo; give another folder with --out")
    source = readers.open_source(_documentation(), field="text", format="jsonl")
    stored = store.read(source)
    given = {"topics": args.topics, "seed": args.seed, "passes": args.passes}
    _say(f"{_size(stored)}; {args.topics} topics")
    run = Run(stored, runs.settings(stored.corpus.num_docs, given) | provenance(stored) | {"demo": True})
    code = _train(run, as_json=False)
    model = run.model()
    saved.save_model(out, model)
    theta = model.transform(stored.corpus)
    typical = report.typical_documents(theta, source.texts())
    path = report.write_report(out / "report.html", model, documents=typical, title="Topics in Python's documentation")
    _print_topics(model, 10)
    print(f"report: {path.resolve().as_uri()}")
    print(f"{time.perf_counter() - begun:.0f} s in all; now with your own text: smoothgrad fit FILE --out MODEL")
    return code


def _train(run, as_json, checkpoints=None, every=None):
    """Train to the end or an interruption, showing it; the exit code."""

    def lines(reports):
        for each in reports:
            _emit({"event": "progress", **record(each), "remaining": each.remaining})
            yield each

    watch = lines if as_json else partial(progress.watch, steps=run.steps)
    try:
        return 0 if run.train(watch, checkpoints, every) else INTERRUPTED
    except NotFiniteError as error:
        _say(str(error))
        return 1


def _last_checkpoint(out, checkpoints, args):
    """The checkpoint to go on from; or None for a new run, if nothing would be lost by it."""
    if out.exists() and not out.is_dir():
        raise CommandError(f"{out}: expected a folder, or none yet; got a file")
    if args.overwrite and not args.resume:
        return None
    last = checkpoints.latest()
    if last and not args.resume:
        raise CommandError(f"{out}: there is a run already; --resume goes on with it, --overwrite replaces it")
    # What a run leaves that is killed before its first checkpoint is nothing to be careful with.
    if not last and out.is_dir() and {path.name for path in out.iterdir()} - {"checkpoints"}:
        what = "no checkpoint to resume from" if args.resume else "is not empty"
        raise CommandError(f"{out}: {what}; --overwrite begins anew")
    if args.resume and not last:
        _say(f"{out}: no run to resume yet; this is a new one")
    return last


def _settings(args, stored, last=None):
    """The settings of a run: what was given, else what the checkpoint says, else what is chosen."""
    names = (*runs.DEFAULTS, "tau", "batch_size", "passes", "held_out")
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    then = last.settings if last else {}
    chosen = _word_options(args) or then.get("word_options")
    settings = runs.settings(stored.corpus.num_docs, then | given) | provenance(stored)
    settings |= {"word_options": chosen} if chosen else {}
    if last:
        # More passes may be asked for; everything else has to be as it was.
        saved.check_same(then | {"passes": settings["passes"]}, settings)
    return settings


def _source(args):
    source = readers.open_source(
        args.inputs,
        field=args.field,
        vocabulary=args.words_file,
        first_id=args.first_id,
        encoding=args.encoding,
        sort=args.sort,
        format=args.format,
    )
    if source.field and not args.field:
        _say(f"the text is taken from the field {source.field!r}; --field takes another")
    return source


def _open(args, last=None):
    """The corpus of the inputs: memory-mapped if it is a corpus folder, else read into memory."""
    source, options = _source(args), _word_options(args)
    if source.format == "folder":
        if options:
            raise CommandError(f"{source.paths[0]}: its words were chosen by convert; leave {', '.join(options)} out")
        return store.open_folder(source.paths[0])
    if last and not options:
        options = last.settings.get("word_options", {})
    with _counting(getattr(args, "json", False)) as show:
        stored = store.read(source, progress=show, **options)
    _say_dropped(stored.manifest)
    return stored


def _word_options(args):
    names = ("vocabulary", "min_df", "max_df", "max_features", "stop_words", "token_pattern")
    options = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if options.get("stop_words") == "none":
        options["stop_words"] = None
    return options


def _aligned(args, model) -> Iterator[Any]:
    """The documents of the inputs in parts, their words numbered as in the model; says what is left out."""
    source = _source(args)
    if source.format == "folder":
        stored = store.open_folder(source.paths[0])
    elif source.is_text and model.vocabulary is None:
        raise CommandError("the model has no vocabulary: it can be applied to counts, not to text")
    elif source.is_text or (source.vocabulary is not None and model.vocabulary is not None):
        tokens = model.settings.get("tokens") or {}
        stored = store.read(source, vocabulary=model.vocabulary, **(tokens if source.is_text else {}))
        _say_dropped(stored.manifest)
    else:
        stored = store.read(source)
    corpus, num_words = stored.corpus, len(model.lam)
    number = None
    if None not in (stored.vocabulary, model.vocabulary) and stored.vocabulary != model.vocabulary:
        places = {word: i for i, word in enumerate(model.vocabulary)}
        number = np.array([places.get(word, -1) for word in stored.vocabulary])
        _say(f"{(number < 0).sum():,} of {len(number):,} words are not in the model, and are left out")
    elif corpus.num_words > num_words:
        raise CommandError(f"the documents have {corpus.num_words:,} words, the model {num_words:,}")

    def renumbered(table):
        if number is None:
            return table
        entries = table.tocoo()
        keep = number[entries.col] >= 0
        place = (entries.row[keep], number[entries.col[keep]])
        return scipy.sparse.csr_array((entries.data[keep], place), (table.shape[0], num_words))

    return (renumbered(documents.as_csr(part)) for part in corpus.parts())


def _texts(source, model):
    """The documents to read: as they are, or of counts the words."""
    if source.is_text:
        return source.texts()
    stored = store.open_folder(source.paths[0]) if source.format == "folder" else store.read(source)
    words = stored.vocabulary or model.words()
    corpus = stored.corpus
    spans = zip(corpus.indptr[:-1].tolist(), corpus.indptr[1:].tolist(), strict=True)
    return (" ".join(words[w] for w in corpus.indices[a:b].tolist()) for a, b in spans)


def _print_topics(model, num_words, most=None, everything=False):
    """The topics, largest first; those that hold almost nothing are counted, as their words mean nothing."""
    share, words = model.shares(), model.top_words(num_words)
    order = np.argsort(-share, kind="stable").tolist()
    alive = [k for k in order if everything or share[k] >= _ALMOST_NOTHING / len(order)]
    for k in alive[:most]:
        print(f"{k:4d} {100 * share[k]:5.1f} %  {' '.join(word for word, _ in words[k])}")
    if most is not None and len(alive) > most:
        print(f"     … and {len(alive) - most} smaller ones")
    if len(order) > len(alive):
        print(f"     {len(order) - len(alive)} of {len(order)} topics hold almost nothing; fewer may do")


@contextmanager
def _table(out, columns, name):
    """A function ``write(number of the first document, rows)``, for TSV, JSON lines or .npz by the name of the file.

    The file appears when it is whole. Without a name it is TSV on the standard output.
    """
    path = Path(out) if out else None
    kind = path.suffix if path else ".tsv"
    if kind not in (".tsv", ".jsonl", ".npz"):
        raise CommandError(f"{path}: expected a name that ends in .tsv, .jsonl or .npz")
    if path and not path.parent.is_dir():
        raise CommandError(f"{path}: there is no folder {path.parent}")
    beside = path.with_name(f"{path.name}.partial-{os.getpid()}") if path else None
    file, kept = beside.open("wb") if path else sys.stdout.buffer, []

    def write(first, rows):
        if kind == ".npz":
            kept.append(rows)
            return
        lines = []
        for number, row in enumerate(rows.tolist(), start=first):
            if kind == ".tsv":
                lines.append("\t".join([str(number), *(f"{value:.6g}" for value in row)]))
            elif name == "theta":
                lines.append(json.dumps({"document": number, "topics": row}))
            else:
                lines.append(json.dumps({"document": number, **dict(zip(columns, row, strict=True))}))
        file.write("".join(f"{line}\n" for line in lines).encode())

    try:
        if kind == ".tsv":
            file.write("\t".join(["document", *columns]).encode() + b"\n")
        yield write
        if kind == ".npz":
            np.savez_compressed(file, **{name: np.concatenate(kept)})
        file.flush()
        if path:
            file.close()
            beside.replace(path)
    finally:
        if path:
            file.close()
            beside.unlink(missing_ok=True)


@contextmanager
def _nothing():
    yield lambda first, rows: None


def _draw(path, curves):
    """Held-out score against passes, one line a window, labelled at its end."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        _say('for a picture of the curves: pip install "smoothgrad_jax[plot]"')
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for window, curve in curves.items():
        if curve:
            x, y = zip(*((each["passes"], each["score"]) for each in curve), strict=True)
            (line,) = axes.plot(x, y, marker=".", label=f"L = {window}")
            axes.annotate(f" L = {window}", (x[-1], y[-1]), color=line.get_color(), va="center")
    axes.set_xlabel("effective passes")
    axes.set_ylabel("nats per held-out word")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _documentation():
    """The texts of the demonstration, as a file in the user's cache; collected the first time."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smoothgrad_jax"
    path = folder / f"documentation-{docstrings.mark()}.jsonl.gz"
    if path.exists():
        return path
    _say("collecting the documentation of Python, numpy, scipy and jax …")
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(beside, "wt", encoding="utf-8", compresslevel=3) as file:
            for name, text in docstrings.collect():
                file.write(json.dumps({"name": name, "text": text}) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


@contextmanager
def _counting(quiet):
    """What is shown while files are read: one line that is written over on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    begun, width = time.perf_counter(), shutil.get_terminal_size().columns - 1

    def show(number, size):
        rate = number / max(time.perf_counter() - begun, 1e-9)
        read = f", {size / 1e6:,.0f} MB" if size else ""
        print(
            f"\rread {number:,} documents{read}, {rate:,.0f} documents/s"[:width], end="", file=sys.stderr, flush=True
        )

    try:
        yield show
    finally:
        print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)


def _say_dropped(manifest):
    dropped = manifest.get("dropped") or {}
    if dropped.get("tokens_outside_vocabulary"):
        lost = dropped.get("documents_that_lost_all_words", 0)
        _say(
            f"{dropped['tokens_outside_vocabulary']:,} words of the text are not in the vocabulary, and are left out"
            + (f"; {lost:,} documents have no other" if lost else "")
        )


def _size(stored):
    manifest = stored.manifest
    return (
        f"{manifest['num_docs']:,} documents, {manifest['num_words']:,} different words, "
        f"{manifest['num_tokens']:,.0f} in all"
    )


def _say(line):
    print(line, file=sys.stderr, flush=True)


def _emit(record):
    print(json.dumps(record), flush=True)
