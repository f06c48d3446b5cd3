"""Train each library of the benchmark, in its own process. This command starts them:

    python experiments/benchmark.py

One function per library: it converts the documents to the library's input, starts the watch, makes the model and one
pass, and records its topics E[β] at the given steps while the watch is stopped. All libraries get the same documents,
K, B, α, η, ρ_t = (τ + t)^−κ for t = 0, 1, …, and the iterations of a document end when the mean change of γ falls below
the tolerance. smoothgrad_jax shuffles the documents itself; the others process them in the given order, which is
shuffled once. Each function's docstring names the differences and the options that a library lacks.
"""

import importlib
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
import time

ANSWER = "RESULT "


class Watch:
    """Measure seconds of training, and save the topics at the checkpoints; saving is not counted."""

    def __init__(self, save):
        self.save = save
        self.begun = time.perf_counter()
        self.since = None
        self.seconds = 0.0
        self.prepare_seconds = None
        self.before_mb = None
        self.workers_mb = 0.0
        self.marks = []

    def start(self):
        """Start. The time before the first start is preparation."""
        if self.prepare_seconds is None:
            self.prepare_seconds = time.perf_counter() - self.begun
            self.before_mb = memory_mb("VmRSS")
        self.since = time.perf_counter()

    def restart(self):
        """Start again from zero."""
        self.seconds = 0.0
        self.start()

    def read(self):
        """Return the seconds so far, without stopping."""
        return self.seconds + time.perf_counter() - self.since

    def stop(self):
        """Stop, and return the seconds so far."""
        self.seconds = self.read()
        return self.seconds

    def mark(self, documents, topics):
        """Stop, record the topics [K, V] that ``topics()`` returns, and start again."""
        import numpy as np

        self.stop()
        values = topics()
        if self.save:  # otherwise memory may be measured, and a copy in float64 would add to it
            values = np.asarray(values, np.float64)
            np.save(f"{self.save}{len(self.marks)}.npy", (values / values.sum(1, keepdims=True)).astype(np.float32))
        self.workers_mb = max(self.workers_mb, workers_mb())
        self.marks.append((documents, self.seconds))
        self.start()


def train_ours(X, spec, watch):
    """Train smoothgrad_jax. The first pass compiles and gives the curve, the second pass gives documents/s.

    Both passes read λ at the same steps.
    """
    import jax

    from smoothgrad_jax import Corpus

    corpus = Corpus.of(X)

    def one_pass(watch):
        watch.start()
        run = our_run(corpus, X.shape[1], spec, passes=1, report_every=spec["every"])
        for progress in run:
            if progress.step in spec["marks"]:
                watch.mark(progress.documents, lambda: run.params.T)
        jax.block_until_ready(run.params)  # λ is assembled on request
        return watch.stop()

    again = Watch(save=None)
    cold, warm = one_pass(watch), one_pass(again)
    return {
        "train_seconds": warm,
        "start_seconds": max(cold - warm, 0.0),
        "warm_marks": again.marks,
        "device": jax.devices()[0].device_kind,
    }


def train_first(X, spec, watch):
    """Measure smoothgrad_jax from the start of the process: interpreter, imports, corpus, compilation, first steps."""
    from smoothgrad_jax import Corpus

    imported = time.time() - spec["started"]
    corpus = Corpus.of(X)
    watch.start()
    steps = spec["marks"][-1]
    run = our_run(corpus, X.shape[1], spec, steps=steps, report_every=steps)
    for progress in run:
        watch.mark(progress.documents, lambda: run.params.T)
    return {"imported_seconds": imported, "first_seconds": time.time() - spec["started"]}


def our_run(corpus, num_words, spec, **length):
    """Return a run of ``fit`` for the caller to iterate."""
    import jax

    from smoothgrad_jax import LDA, fit, init_topics, robbins_monro

    key_topics, key_order = jax.random.split(jax.random.key(spec["seed"]))
    return fit(
        corpus,
        LDA(spec["alpha"], spec["eta"], spec["documents"], spec["tolerance"], spec["max_iter"]),
        init_topics(key_topics, num_words, spec["topics"]),
        window=spec["window"],
        rho=robbins_monro(spec["tau"], spec["kappa"]),
        batch_size=spec["batch"],
        key=key_order,
        **length,
    )


def train_sklearn(X, spec, watch):
    """Train scikit-learn with ``partial_fit``, because ``fit`` adds an E-step over all documents at the end."""
    from sklearn.decomposition import LatentDirichletAllocation

    def model(num_topics):
        return LatentDirichletAllocation(
            num_topics,
            doc_topic_prior=spec["alpha"],
            topic_word_prior=spec["eta"],
            learning_offset=spec["tau"] - 1,  # scikit-learn counts minibatches from 1
            learning_decay=spec["kappa"],
            batch_size=spec["batch"],
            total_samples=spec["documents"],
            mean_change_tol=spec["tolerance"],
            max_doc_update_iter=spec["max_iter"],
            n_jobs=spec["workers"],
            random_state=spec["seed"],
        )

    X = X.astype("float32")  # the precision of the other libraries
    watch.start()
    start_seconds = 0.0
    if spec["workers"] > 1:
        model(2).partial_fit(X[: spec["workers"]])  # starts the worker processes, the counterpart of compilation
        start_seconds = watch.stop()
        watch.start()
    lda, begin = model(spec["topics"]), 0
    for step in spec["marks"]:
        end = step * spec["batch"]
        lda.partial_fit(X[begin:end])
        watch.mark(end, lambda: lda.components_)
        begin = end
    return {"train_seconds": watch.marks[-1][1] - start_seconds, "start_seconds": start_seconds}


def train_gensim(X, spec, watch):
    """Train gensim's LdaModel, in float32 by default."""
    from gensim.models import LdaModel

    gensim_pass(LdaModel, X, spec, watch)


def train_multicore(X, spec, watch):
    """Train gensim's LdaMulticore. With W workers it updates after W minibatches, so its B is W times as large."""
    import multiprocessing

    from gensim.models import LdaMulticore

    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork")  # the fastest start, and the marks below cannot be pickled
    gensim_pass(LdaMulticore, X, spec, watch, workers=spec["workers"])


def gensim_pass(model, X, spec, watch, **options):
    """Record the marks in the M-step, because a second ``update`` would treat the first documents as another corpus."""
    pending = [step * spec["batch"] for step in spec["marks"]]

    class Marked(model):
        def do_mstep(self, *args, **kwargs):
            super().do_mstep(*args, **kwargs)
            if pending and self.num_updates >= pending[0]:
                pending.pop(0)
                watch.mark(self.num_updates, self.get_topics)

    words, counts, ends = X.indices.tolist(), X.data.tolist(), X.indptr.tolist()
    documents = [list(zip(words[a:b], counts[a:b], strict=True)) for a, b in itertools.pairwise(ends)]
    names = {word: str(word) for word in range(X.shape[1])}
    watch.start()
    lda = Marked(
        num_topics=spec["topics"],
        id2word=names,
        chunksize=spec["batch"],
        alpha=spec["alpha"],
        eta=spec["eta"],
        offset=spec["tau"],
        decay=spec["kappa"],
        iterations=spec["max_iter"],
        gamma_threshold=spec["tolerance"],
        eval_every=None,
        random_state=spec["seed"],
        **options,
    )
    lda.update(documents)


def train_tomotopy(X, spec, watch):
    """Train tomotopy, a different algorithm: Gibbs sampling of the corpus. A document counts once per sweep."""
    import numpy as np
    from tomotopy import LDAModel, TermWeight

    num_topics, eta = spec["topics"], spec["eta"]
    lda = LDAModel(TermWeight.ONE, k=num_topics, alpha=spec["alpha"], eta=eta, seed=spec["seed"])
    lda.optim_interval = 0  # keeps α fixed, as in the other libraries
    names = [str(word) for word in range(X.shape[1])]
    for begin, end in itertools.pairwise(X.indptr):
        lda.add_doc([names[word] for word in np.repeat(X.indices[begin:end], X.data[begin:end])])

    def topics():
        # (n_kw + η) / (n_k + ηV) over all V words; tomotopy's own estimate covers only the words it has seen
        used = [int(word) for word in lda.used_vocabs]
        tokens = lda.get_count_by_topics()
        lam = np.full((num_topics, X.shape[1]), eta)
        for k in range(num_topics):
            lam[k, used] = lda.get_topic_word_dist(k) * (tokens[k] + eta * len(used))
        return lam

    watch.start()
    done = 0
    for step in spec["marks"]:
        sweeps = max(round(spec["sweeps"] * step / spec["marks"][-1]), done + 1)
        lda.train(sweeps - done, workers=spec["workers"])
        watch.mark(sweeps * spec["documents"], topics)
        done = sweeps


def train_vw(X, spec, watch):
    """Train Vowpal Wabbit from a text file, because its Python ``learn`` accepts no documents without labels.

    A checkpoint is therefore a separate run over the first lines. A thread parses the file, which costs no measurable
    time; a binary cache is not faster. The iterations of a document have no maximum. The initial λ does not depend on
    the seed.
    """
    import numpy as np
    from vowpalwabbit import Workspace

    num_words, batch, first = X.shape[1], spec["batch"], spec["tau"] - 1
    words, counts, ends = X.indices.tolist(), X.data.tolist(), X.indptr.tolist()
    lines = [
        "| " + " ".join(f"{word}:{count}" for word, count in zip(words[a:b], counts[a:b], strict=True)) + "\n"
        for a, b in itertools.pairwise(ends)
    ]
    # Vowpal Wabbit divides the change by Σγ = tokens + Kα; this is the same tolerance for an average document.
    epsilon = spec["tolerance"] * spec["topics"] / (X.data.sum() / X.shape[0] + spec["topics"] * spec["alpha"])
    options = {
        "--lda": spec["topics"],
        "--lda_alpha": spec["alpha"],
        "--lda_rho": spec["eta"],
        "--lda_D": spec["documents"],
        "--lda_epsilon": epsilon,
        "--minibatch": batch,
        "--example_queue_limit": 2 ** math.ceil(math.log2(max(batch, 256))),  # a shorter queue crashes
        "--bit_precision": math.ceil(math.log2(num_words)),  # words are their own hashes
        "--learning_rate": 1,
        "--initial_t": first,
        "--power_t": spec["kappa"],
    }
    fixed = ["--quiet", "--noconstant", *(str(part) for option in options.items() for part in option)]

    def topics(workspace, steps):
        weights = np.array([[workspace.get_weight(w, k) for k in range(spec["topics"] + 1)] for w in range(num_words)])
        # λ − η of a word decays only when the word occurs; the column after the topics holds the last such step.
        log_decay = np.cumsum(np.log1p(-((spec["tau"] + np.arange(steps)) ** -spec["kappa"])))
        log_decay = np.concatenate([[0.0], log_decay])
        last_step = weights[:, -1].astype(int) - first
        return spec["eta"] + (weights[:, :-1] * np.exp(log_decay[steps] - log_decay[last_step])[:, None]).T

    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, str(step)) for step in spec["marks"]]
        for step, path in zip(spec["marks"], paths, strict=True):
            path.write_text("".join(lines[: step * batch]))
        for step, path in zip(spec["marks"], paths, strict=True):
            watch.restart()
            workspace = Workspace(arg_list=[*fixed, "--data", str(path)])
            watch.mark(step * batch, lambda workspace=workspace, step=step: topics(workspace, step))
            workspace.finish()


TRAINERS = {
    "ours": train_ours,
    "first": train_first,
    "sklearn": train_sklearn,
    "gensim": train_gensim,
    "multicore": train_multicore,
    "tomotopy": train_tomotopy,
    "vw": train_vw,
}


def memory_mb(field):
    """Return memory of this process in MB: ``VmRSS`` is current, ``VmHWM`` is the peak."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    # On Linux ru_maxrss starts at the memory of the process that called exec, which here holds the corpus.
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def workers_mb():
    """Return memory of the child processes, with shared pages counted once; 0 without /proc."""
    total = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{os.getpid()}\n" in status.read_text():
                lines = (status.parent / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return total / 1024


def main():
    """Train the library that the argument, a JSON object, describes; print the measurements as the last line."""
    spec = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec["cores"])  # must precede the start of any threads
    for module in spec["modules"]:
        importlib.import_module(module)  # not counted as preparation
    import scipy.sparse

    X = scipy.sparse.load_npz(spec["train"])
    watch = Watch(spec["save"])
    found = TRAINERS[spec["train_with"]](X, spec, watch) or {}
    answer = {
        "train_seconds": watch.marks[-1][1],
        "start_seconds": 0.0,
        "prepare_seconds": watch.prepare_seconds,
        "before_mb": watch.before_mb,
        "peak_mb": memory_mb("VmHWM"),
        "workers_mb": watch.workers_mb,
        "marks": watch.marks,
    }
    print(ANSWER + json.dumps(answer | found), flush=True)


if __name__ == "__main__":
    main()
