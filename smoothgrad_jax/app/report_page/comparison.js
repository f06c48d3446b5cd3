// Comparison with another model: the matched topic of the selected topic, and all pairs side by side.

const { comparison } = data; // null if the report was written without another model
const COMPARED_WORDS = 20; // top words of both topics, by probability
const PAIR_WORDS = 8;

/** Return the most probable words of a topic of this model. */
const topWords = (k, number) => topics[k].words.slice(0, number).map((i) => words[i]);
const otherName = (j) => (comparison.topics[j].label ? `Topic ${j}: ${comparison.topics[j].label}` : `Topic ${j}`);

/** Return words as text; words that the other topic has too are bold. */
function comparedWords(own, others) {
  return joined(own.map((word) => make(others.includes(word) ? "b" : "span", { dir: "auto", textContent: word })), " ");
}

/** Show the matched topic of the selected topic, and which top words both have. */
function showMatch() {
  if (!comparison) return;
  const j = comparison.partner[state.topic];
  if (j < 0) {
    byId("match-facts").textContent = "No topic is matched: the other model has fewer topics.";
    byId("match-words").replaceChildren();
    return;
  }
  const other = comparison.topics[j];
  const facts = [otherName(j), `similarity ${comparison.similarity[state.topic].toFixed(2)}`, `${percent(other.prevalence)} of the corpus`];
  byId("match-facts").textContent = [...facts, ...(other.npmi === null ? [] : [`NPMI ${coherence(other)}`])].join(" · ");
  const own = topWords(state.topic, COMPARED_WORDS);
  const parts = [
    ["In both", own.filter((word) => other.words.includes(word))],
    ["Only here", own.filter((word) => !other.words.includes(word))],
    [`Only in ${comparison.name}`, other.words.filter((word) => !own.includes(word))],
  ];
  byId("match-words").replaceChildren(...parts.flatMap(([name, list]) => [
    make("dt", { textContent: name }),
    make("dd", {}, ...(list.length ? joined(list.map((word) => isolated(word)), " ") : ["none"])),
  ]));
}

const pairs = (comparison ? topics : []).map((_, k) => {
  const item = make("li");
  item.setAttribute("role", "option");
  item.addEventListener("click", () => { select(k); byId("compared").scrollIntoView({ block: "center" }); });
  return item;
});

/** Show the names and words of all pairs side by side. */
function showPairs() {
  for (const [k, item] of pairs.entries()) {
    const j = comparison.partner[k];
    const own = topWords(k, PAIR_WORDS);
    const others = j < 0 ? [] : comparison.topics[j].words.slice(0, PAIR_WORDS);
    const meter = make("span", { className: "similarity numbers" },
      make("span", { textContent: j < 0 ? "–" : comparison.similarity[k].toFixed(2) }), make("span", { className: "meter" }, make("i")));
    meter.querySelector("i").style.width = `${100 * comparison.similarity[k]}%`;
    item.replaceChildren(
      make("span", {}, make("b", { className: "label", dir: "auto", textContent: nameOf(k) }), make("span", {}, ...comparedWords(own, others))),
      meter,
      make("span", {}, ...(j < 0 ? ["no matched topic"] : [
        make("b", { className: "label", dir: "auto", textContent: otherName(j) }), make("span", {}, ...comparedWords(others, own))])),
    );
  }
}

function showPairOrder() {
  byId("pairs").replaceChildren(...order.map((k) => pairs[k]).filter((item) => item));
}

if (comparison) {
  byId("comparison").hidden = byId("compared").hidden = false;
  for (const id of ["comparison-title", "compared-title"]) byId(id).append("Comparison with ", isolated(comparison.name));
  byId("comparison-note").textContent =
    `Topics are matched one to one, so that the sum of their similarities is largest. Similarity: cosine of the word ` +
    `probabilities over the ${count(comparison.num_common_words, "word", "words")} that both models have; mean ` +
    `${comparison.mean.toFixed(2)}. Bold words are among the first ${PAIR_WORDS} of both topics. ` +
    "Held-out scores can be compared if both models have the same words and held-out documents.";
  for (const line of [["", "here", comparison.name], ...comparison.quality]) {
    byId("both").append(make("tr", {}, ...line.map((text, i) => make(i ? "td" : "th", { textContent: text }))));
  }
  const alone = comparison.topics.map((_, j) => j).filter((j) => !comparison.partner.includes(j));
  byId("alone").hidden = alone.length === 0;
  byId("alone").append(make("h3", {}, "Only in ", isolated(comparison.name)), make("ul", {}, ...alone.map((j) =>
    make("li", {}, make("b", { className: "label", dir: "auto", textContent: otherName(j) }),
      make("span", {}, ...comparedWords(comparison.topics[j].words.slice(0, PAIR_WORDS), []))))));
}
