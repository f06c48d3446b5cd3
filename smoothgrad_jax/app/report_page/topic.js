// The selected topic: facts, words, typical documents.

const NUM_WORDS = 30; // words of the selected topic; twice as many after a click on “More words”

function showTopic() {
  const topic = topics[state.topic];
  byId("name").textContent = `Topic ${state.topic}`;
  showFacts(topic);
  showLabelField();
  byId("mu").value = state.mu;
  byId("mu").setAttribute("aria-valuetext", state.mu.toFixed(2));
  byId("formula").textContent =
    state.mu === 1 ? "Relevance μ = 1: most probable words first"
    : state.mu === 0 ? "Relevance μ = 0: words with the highest lift first"
    : `Relevance μ = ${state.mu.toFixed(2)}: between probability and lift`;

  showWords(topic);
  showDocuments();
}

/** Show prevalence, coherence and remarks; a near-duplicate can be selected. */
function showFacts(topic) {
  const facts = [`${percent(topic.prevalence)} of the corpus`, ...(scored ? [`NPMI ${coherence(topic)}`] : [])];
  if (topic.junk) facts.push(`junk: ${topic.junk}`);
  if (topic.duplicates.length) {
    const others = topic.duplicates.map((k) => makeButton(String(k), () => select(k), { className: "link", title: nameOf(k) }));
    facts.push(make("span", {}, "near-duplicate of ", ...joined(others, ", ")));
  }
  byId("prevalence").replaceChildren(...joined(facts, " · "));
}

function showWords(topic) {
  const shown = ranked(topic, state.mu).slice(0, state.all ? 2 * NUM_WORDS : NUM_WORDS);
  const topicGivenWord = (i) => Math.min(1, (topic.prevalence * topic.p[i]) / marginal[topic.words[i]]);
  // The scale is bounded, so that one very frequent word does not shrink all other bars; longer bars fade out.
  const largest = Math.min(
    Math.max(...shown.map((i) => counts[topic.words[i]])),
    3 * Math.max(...shown.map((i) => counts[topic.words[i]] * topicGivenWord(i))) || Infinity, // prevalence 0
  );
  const lines = shown.map((i) => {
    const word = topic.words[i];
    const lift = topic.p[i] / marginal[word];
    const own = topicGivenWord(i);
    const button = makeButton(words[word], () => search(words[word]), { title: words[word], dir: "auto" });
    button.setAttribute("aria-label", `${words[word]}: probability ${percent(topic.p[i])}, lift ${times(lift)}`);
    button.addEventListener("focus", () => highlight(word));
    button.addEventListener("blur", () => highlight(null));
    const wide = make("i", { className: counts[word] > largest ? "all beyond" : "all" });
    const narrow = make("i", { className: "own" });
    wide.style.width = `${Math.min(100, (100 * counts[word]) / largest)}%`;
    narrow.style.width = `${(100 * own * counts[word]) / largest}%`;
    const bar = make("span", { className: "bar" }, wide, narrow);
    bar.title = `${percent(own)} of the ${integer(counts[word])} occurrences of “${words[word]}” are in this topic`;
    const line = make(
      "li", {}, button, bar,
      make("span", { className: "value numbers", textContent: percent(topic.p[i]) }),
      make("span", { className: "value lift numbers", textContent: times(lift) }),
    );
    line.dataset.word = word;
    line.addEventListener("pointerenter", () => highlight(word));
    line.addEventListener("pointerleave", () => highlight(null));
    return line;
  });
  const head = make(
    "li", { className: "head" },
    make("span"),
    make("span", { className: "key" },
      make("span", { textContent: "in this topic" }),
      make("span", { className: "all", textContent: "in the corpus" })),
    make("span", { textContent: "probability", title: "p(word | topic)" }),
    make("span", { textContent: "lift", title: "p(word | topic) / p(word): relative to the probability in the corpus" }),
  );
  head.setAttribute("aria-hidden", "true");
  byId("words").replaceChildren(head, ...lines);
  byId("more").hidden = topic.words.length <= NUM_WORDS;
  byId("more").textContent = state.all ? "Fewer words" : "More words";
  showHighlight();
}

function showDocuments() {
  const documents = data.documents[state.topic] ?? [];
  byId("documents").hidden = documents.length === 0;
  const entries = documents.map(([proportion, title, text]) => {
    const body = make("p", { dir: "auto", className: "clamped" }, ...marked(text));
    return make("li", { tabIndex: -1 }, make("strong", { dir: "auto" }, ...marked(title)), " ",
      make("span", { className: "quiet numbers", textContent: `${percent(proportion)} in this topic` }), body);
  });
  byId("documents").querySelector("ol").replaceChildren(...entries);
  for (const entry of entries) {
    const body = entry.querySelector("p");
    if (body.scrollHeight <= body.clientHeight + 1) continue; // the complete text is visible
    const toggle = () => { button.textContent = body.classList.toggle("clamped") ? "More" : "Less"; };
    const button = makeButton("More", toggle);
    entry.append(button);
  }
}

/** Show a typical document of a topic completely. */
function showDocument(k, number) {
  select(k);
  const entry = byId("documents").querySelectorAll("li")[number];
  if (entry.querySelector(".clamped")) entry.querySelector("button")?.click();
  entry.scrollIntoView({ block: "center" });
  entry.focus({ preventScroll: true });
}

/** Highlight the word whose topics the map shows. */
function showHighlight() {
  const word = state.hovered ?? state.word;
  for (const line of byId("words").children) line.classList.toggle("highlighted", line.dataset.word === String(word));
}

function highlight(word) {
  state.hovered = word;
  showHighlight();
  showMap();
}

function setRelevance(mu) {
  state.mu = Math.round(mu * data.positions) / data.positions;
  showTopic();
  writeUrl();
}

byId("mu").step = 1 / data.positions;
byId("mu").addEventListener("input", (event) => setRelevance(event.target.valueAsNumber));
byId("by-lift").addEventListener("click", () => setRelevance(0));
byId("by-probability").addEventListener("click", () => setRelevance(1));
byId("more").addEventListener("click", () => { state.all = !state.all; showTopic(); });
