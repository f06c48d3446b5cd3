"""A first job that needs no download: plant topics, generate a corpus from them, find them again.

    python experiments/planted_topics.py

Prints the words of each planted topic beside those of the topic found for it, and the held-out score beside the score
of the planted topics themselves, which nothing can beat but by chance.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax import LDA, fit, init_topics, log_predictive, pack, split_documents, topics

PLANTED = {
    "astronomy": "star galaxy telescope orbit planet redshift supernova dust comet spectrum halo dwarf",
    "cooking": "oven flour butter garlic simmer whisk onion pepper dough broth recipe salt",
    "sailing": "sail harbour anchor mast wind rudder tide crew hull rope deck knot",
    "finance": "market bond price yield investor credit stock risk bank loan hedge profit",
    "genetics": "gene genome protein cell mutation sequence chromosome allele dna enzyme species trait",
    "music": "melody chord rhythm violin piano concert tempo harmony song choir symphony note",
    "football": "goal match penalty striker league referee coach defender stadium tackle season keeper",
    "gardening": "soil seed prune compost tomato bloom weed hedge root pot shade harvest",
}
COMMON = "time year people way day thing man world life hand part place case week group number fact point home water"


def generate(rng, num_docs, mean_tokens):
    """Documents of a few topics each, with common words in between; topics [K, V] and the vocabulary."""
    vocabulary = sorted({word for words in [*PLANTED.values(), COMMON] for word in words.split()})
    index = {word: i for i, word in enumerate(vocabulary)}
    planted = np.zeros((len(PLANTED), len(vocabulary)))
    for k, words in enumerate(PLANTED.values()):
        own = [index[word] for word in words.split()]
        planted[k, own] = 0.7 / np.arange(1, len(own) + 1)  # the first words are the frequent ones
        planted[k, [index[word] for word in COMMON.split()]] += 0.02
    planted /= planted.sum(1, keepdims=True)
    theta = rng.dirichlet(np.full(len(PLANTED), 0.15), num_docs)
    tokens = np.maximum(rng.poisson(mean_tokens, num_docs), 1)
    return np.array([rng.multinomial(n, p) for n, p in zip(tokens, theta @ planted, strict=True)]), planted, vocabulary


def main():
    """Generate, fit, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=200, help="minibatches")
    parser.add_argument("--batch", type=int, default=200, help="documents per minibatch")
    parser.add_argument("--window", type=int, default=10, help="L, how many minibatches are averaged")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    X, planted, vocabulary = generate(rng, args.documents, mean_tokens=60)
    train, test = X[:-500], X[-500:]
    num_topics, num_words = planted.shape
    print(f"{len(train):,} documents over {num_words} words, generated from {num_topics} topics")

    model = LDA(alpha=0.2, eta=0.1, num_docs=len(train))
    halves = [pack(half) for half in split_documents(test, jax.random.key(args.seed + 1))]
    lam = init_topics(jax.random.key(args.seed), num_words, num_topics)
    every = max(args.steps // 5, 1)
    training = fit(
        train,
        model,
        lam,
        window=args.window,
        steps=args.steps,
        batch_size=args.batch,
        key=jax.random.key(args.seed + 2),
        held_out=tuple(halves),
        every=every,
        score_every=every,
    )

    print(f"\n{'step':>6}{'documents/s':>14}{'held-out log p(word)':>24}")
    print(f"{0:>6}{'':>14}{log_predictive(model, lam, *halves):>24.4f}")
    try:
        for progress in training:
            rate = f"{progress.rate:,.0f}" if progress.step > every else "(compiling)"
            print(f"{progress.step:>6}{rate:>14}{progress.score:>24.4f}")
    except KeyboardInterrupt:
        print(f"{training.state.step:>6}{'interrupted':>14}")  # what was learned until now is shown all the same
    best = log_predictive(model, jnp.asarray(1e6 * planted.T + 1e-3, jnp.float32), *halves)
    print(f"{'':>6}{'planted':>14}{best:>24.4f}\n")

    found = np.asarray(topics(training.params))
    likeness = np.sqrt(planted) @ np.sqrt(found.T)  # Bhattacharyya: 1 for equal distributions
    print(f"{'planted topic':<12}  {'likeness':>8}  most probable words found")
    for k, name in enumerate(PLANTED):
        match = int(likeness[k].argmax())
        words = " ".join(vocabulary[w] for w in found[match].argsort()[::-1][:8])
        print(f"{name:<13} {likeness[k, match]:>8.3f}  {words}")


if __name__ == "__main__":
    main()
