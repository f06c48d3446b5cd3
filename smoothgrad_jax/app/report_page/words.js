// Relevance of words, and the topics of a word.

/** Return indices into topic.words, sorted by relevance μ log p(w|k) + (1 − μ) log(p(w|k) / p(w)). */
function ranked(topic, mu) {
  const score = topic.p.map((p, i) => Math.log(p) - (1 - mu) * Math.log(marginal[topic.words[i]]));
  return score.map((_, i) => i).sort((a, b) => score[b] - score[a] || a - b);
}

/** Return p(k|w) of the most probable topics of a word. */
function topicsOfWord(word) {
  const pairs = data.word_topics[word];
  const probabilities = new Map();
  for (let i = 0; i < pairs.length; i += 2) probabilities.set(pairs[i], pairs[i + 1] / 1000);
  return probabilities;
}

const relevantWords = topics.map((topic) => ranked(topic, DEFAULT_MU).slice(0, 8).map((i) => words[topic.words[i]]));
