"""How each contestant of the benchmark is trained, in a process of its own; this is the command that starts them:

    python experiments/benchmark.py

One function a contestant: it brings the documents into the form that the library takes, starts the watch, makes the
model and one pass, and hands over its topics E[β] at the given steps while the watch stands still. All of them get the
same rows, K, B, α, η, ρ_t = (τ + t)^−κ for t = 0, 1, …, and a document's iterations end when the mean change of γ falls
below the tolerance. Ours draws an order of its own; the others take the rows as they come, shuffled once for all of
them. What a library does differently, or does not let one set, is said at its function.
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
    """Seconds of training and the topics at the checkpoints; saving the topics is not counted."""

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
        """Run. The time before the first start is preparation."""
        if self.prepare_seconds is None:
            self.prepare_seconds = time.perf_counter() - self.begun
            self.before_mb = memory_mb("VmRSS")
        self.since = time.perf_counter()

    def restart(self):
        """Run again from zero."""
        self.seconds = 0.0
        self.start()

    def read(self):
        """The seconds so far, while it runs."""
        return self.seconds + time.perf_counter() - self.since

    def stop(self):
        """Stand still; the seconds so far."""
        self.seconds = self.read()
        return self.seconds

    def mark(self, documents, topics):
        """Stop, record the topics [K, V] that ``topics()`` returns, and go on."""
        import numpy as np

        self.stop()
        values = topics()
        if self.save:  # without, memory may be what is looked at, and a copy in float64 would be ours
            values = np.asarray(values, np.float64)
            np.save(f"{self.save}{len(self.marks)}.npy", (values / values.sum(1, keepdims=True)).astype(np.float32))
        self.workers_mb = max(self.workers_mb, workers_mb())
        self.marks.append((documents, self.seconds))
        self.start()


def train_ours(X, spec, watch):
    """smoothgrad_jax. The pass is made twice: the first compiles and gives the curve, the second documents/s.

    Both passes look at λ at the same steps.
    """
    import jax

    from smoothgrad_jax import Corpus

    corpus = Corpus.of(X)

    def one_pass(watch):
        watch.start()
        run = our_run(corpus, X.shape[1], spec, passes=1, every=spec["every"])
        for progress in run:
            if progress.step in spec["marks"]:
                watch.mark(progress.documents, lambda: run.params.T)
        jax.block_until_ready(run.params)  # λ as a whole is put together when it is asked for
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
    """smoothgrad_jax from the start of the process: interpreter, imports, corpus, compilation, the first steps."""
    from smoothgrad_jax import Corpus

    imported = time.time() - spec["started"]
    corpus = Corpus.of(X)
    watch.start()
    steps = spec["marks"][-1]
    run = our_run(corpus, X.shape[1], spec, steps=steps, every=steps)
    for progress in run:
        watch.mark(progress.documents, lambda: run.params.T)
    return {"imported_seconds": imported, "first_seconds": time.time() - spec["started"]}


def our_run(corpus, num_words, spec, **length):
    """A run that the caller iterates."""
    import jax

    from smoothgrad_jax import LDA, fit, init_topics, robbins_monro

    key_topics, key_order = jax.random.split(jax.random.key(spec["seed"]))
    return fit(
        corpus,
        LDA(spec["alpha"], spec["eta"], spec["documents"]),
        init_topics(key_topics, num_words, spec["topics"]),
        window=spec["window"],
        rho=robbins_monro(spec["tau"], spec["kappa"]),
        batch_size=spec["batch"],
        key=key_order,
        tol=spec["tolerance"],
        max_iter=spec["max_iter"],
        **length,
    )


def train_sklearn(X, spec, watch):
    """scikit-learn. ``fit`` ends with one more E-step over all documents; ``partial_fit`` makes the pass alone."""
    from sklearn.decomposition import LatentDirichletAllocation

    def model(num_topics):
        return LatentDirichletAllocation(
            num_topics,
            doc_topic_prior=spec["alpha"],
            topic_word_prior=spec["eta"],
            learning_offset=spec["tau"] - 1,  # it counts the minibatches from 1
            learning_decay=spec["kappa"],
            batch_size=spec["batch"],
            total_samples=spec["documents"],
            mean_change_tol=spec["tolerance"],
            max_doc_update_iter=spec["max_iter"],
            n_jobs=spec["workers"],
            random_state=spec["seed"],
        )

    X = X.astype("float32")  # what the others compute in
    watch.start()
    start_seconds = 0.0
    if spec["workers"] > 1:
        model(2).partial_fit(X[: spec["workers"]])  # its processes start here, as our compilation does, and stay
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
    """gensim's LdaModel, in float32 by default."""
    from gensim.models import LdaModel

    gensim_pass(LdaModel, X, spec, watch)


def train_multicore(X, spec, watch):
    """gensim's LdaMulticore. With W workers it updates after W minibatches, so that its B is W times as large."""
    import multiprocessing

    from gensim.models import LdaMulticore

    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork")  # the cheapest start, and the marks below are not to be pickled
    gensim_pass(LdaMulticore, X, spec, watch, workers=spec["workers"])


def gensim_pass(model, X, spec, watch, **options):
    """The marks are set in the M-step: a second ``update`` would take the first documents for another corpus."""
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
    """tomotopy: Gibbs sampling of the whole corpus, another algorithm. A document counts once a sweep."""
    import numpy as np
    from tomotopy import LDAModel, TermWeight

    num_topics, eta = spec["topics"], spec["eta"]
    lda = LDAModel(TermWeight.ONE, k=num_topics, alpha=spec["alpha"], eta=eta, seed=spec["seed"])
    lda.optim_interval = 0  # α stays fixed, as everyone's
    names = [str(word) for word in range(X.shape[1])]
    for begin, end in itertools.pairwise(X.indptr):
        lda.add_doc([names[word] for word in np.repeat(X.indices[begin:end], X.data[begin:end])])

    def topics():
        # (n_kw + η) / (n_k + ηV) over all V words; its own figure has only the words that it has seen
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
    """Vowpal Wabbit. It reads a text file while it trains: its Python ``learn`` does not take documents without labels.

    So a checkpoint is a run over the first lines, from the beginning. Its own thread parses, which costs no measurable
    time; a binary cache is not faster. A document's iterations have no maximum. λ starts the same for every seed.
    """
    import numpy as np
    from vowpalwabbit import Workspace

    num_words, batch, first = X.shape[1], spec["batch"], spec["tau"] - 1
    words, counts, ends = X.indices.tolist(), X.data.tolist(), X.indptr.tolist()
    lines = [
        "| " + " ".join(f"{word}:{count}" for word, count in zip(words[a:b], counts[a:b], strict=True)) + "\n"
        for a, b in itertools.pairwise(ends)
    ]
    # It divides the change by Σγ = tokens + Kα: this is the same tolerance for a document of average length.
    epsilon = spec["tolerance"] * spec["topics"] / (X.data.sum() / X.shape[0] + spec["topics"] * spec["alpha"])
    options = {
        "--lda": spec["topics"],
        "--lda_alpha": spec["alpha"],
        "--lda_rho": spec["eta"],
        "--lda_D": spec["documents"],
        "--lda_epsilon": epsilon,
        "--minibatch": batch,
        "--example_queue_limit": 2 ** math.ceil(math.log2(max(batch, 256))),  # a shorter queue crashes it
        "--bit_precision": math.ceil(math.log2(num_words)),  # words are their own hashes
        "--learning_rate": 1,
        "--initial_t": first,
        "--power_t": spec["kappa"],
    }
    fixed = ["--quiet", "--noconstant", *(str(part) for option in options.items() for part in option)]

    def topics(workspace, steps):
        table = np.array([[workspace.get_weight(w, k) for k in range(spec["topics"] + 1)] for w in range(num_words)])
        # λ − η of a word decays only when the word is met; the column behind the topics says when that was.
        log_decay = np.cumsum(np.log1p(-((spec["tau"] + np.arange(steps)) ** -spec["kappa"])))
        log_decay = np.concatenate([[0.0], log_decay])
        last_met = table[:, -1].astype(int) - first
        return spec["eta"] + (table[:, :-1] * np.exp(log_decay[steps] - log_decay[last_met])[:, None]).T

    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, str(step)) for step in spec["marks"]]
        for step, path in zip(spec["marks"], paths, strict=True):
            path.write_text("".join(lines[: step * batch]))
        for step, path in zip(spec["marks"], paths, strict=True):
            watch.restart()
            workspace = Workspace(arg_list=[*fixed, "--data", str(path)])
            watch.mark(step * batch, lambda workspace=workspace, step=step: topics(workspace, step))
            workspace.finish()


CONTESTANTS = {
    "ours": train_ours,
    "first": train_first,
    "sklearn": train_sklearn,
    "gensim": train_gensim,
    "multicore": train_multicore,
    "tomotopy": train_tomotopy,
    "vw": train_vw,
}


def memory_mb(field):
    """Of this process: ``VmRSS`` now, ``VmHWM`` at the peak."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    # Linux: ru_maxrss starts at the memory of the process that called exec, which here holds the whole corpus.
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def workers_mb():
    """Memory of the processes that this one has started, shared pages counted once in all; 0 where /proc is missing."""
    total = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{os.getpid()}\n" in status.read_text():
                lines = (status.parent / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:  # it has ended meanwhile, or is not ours to read
            continue
    return total / 1024


def main():
    """Train the contestant that the argument, a JSON object, describes; print what was measured as the last line."""
    spec = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec["cores"])  # before anything starts its threads
    for module in spec["modules"]:
        importlib.import_module(module)  # not counted as preparation
    import scipy.sparse

    X = scipy.sparse.load_npz(spec["train"])
    watch = Watch(spec["save"])
    found = CONTESTANTS[spec["train_with"]](X, spec, watch) or {}
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
