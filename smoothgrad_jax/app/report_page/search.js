// Search for words, labels and typical documents.

const MAX_WORDS_FOUND = 8;
const MAX_RESULTS = 4; // labelled topics and documents
const lower = words.map((word) => word.toLowerCase());
const documents = Object.entries(data.documents).flatMap(([k, entries]) =>
  entries.map(([, title, text], number) => ({ topic: Number(k), number, title, lower: `${title}\n${text}`.toLowerCase() })));

/** Return matching words: the query itself, words that start with it, words that contain it; frequent words first. */
function matchingWords(wanted) {
  const ranks = [[], [], []];
  lower.forEach((word, i) => {
    const rank = word === wanted ? 0 : word.startsWith(wanted) ? 1 : word.includes(wanted) ? 2 : 3;
    if (rank < 3) ranks[rank].push(i);
  });
  return ranks.flat().slice(0, MAX_WORDS_FOUND);
}

/** Return typical documents that contain the query; matches in the title come first. */
function matchingDocuments(wanted) {
  const found = documents.filter((entry) => entry.lower.includes(wanted));
  const inTitle = (entry) => entry.title.toLowerCase().includes(wanted);
  return [...found.filter(inTitle), ...found.filter((entry) => !inTitle(entry))];
}

/** Show what matches, and sort the topics by p(k|w) of a matching word: `chosen`, or the best match by default. */
function search(query, chosen = null) {
  if (byId("search").value !== query) byId("search").value = query;
  const wanted = query.trim().toLowerCase();
  const found = wanted ? matchingWords(wanted) : [];
  const exact = words.indexOf(query); // a word that was clicked; case-sensitive
  const previous = state.word;
  state.word = chosen ?? (exact >= 0 ? exact : (found[0] ?? null));
  state.query = query;
  state.hovered = null;
  showWordsFound(query, found);
  showResults(wanted);
  byId("sort").querySelector('[value="match"]').disabled = state.word === null;
  if (state.word !== null) setSort("match");
  else if (previous !== null && state.sort === "match") setSort("prevalence");
  showHighlight();
  showDocuments();
  showMap();
  byId("topics").scrollTop = 0;
  writeUrl();
}

function showWordsFound(query, found) {
  const buttons = (found.length < 2 ? [] : found).map((i) => {
    const button = makeButton(words[i], () => search(query, i), { title: words[i], dir: "auto" });
    button.setAttribute("aria-pressed", i === state.word);
    return button;
  });
  byId("others").replaceChildren(...buttons);
  const { word } = state;
  if (!query.trim()) byId("found").replaceChildren();
  else if (word === null) byId("found").replaceChildren("Not among the top words of any topic: ", isolated(query.trim()));
  else byId("found").replaceChildren(isolated(words[word]), ` occurs ${data.counted ? "" : "about "}${integer(counts[word])} times`);
}

/** Show labels and typical documents that contain the query, as buttons that select them. */
function showResults(wanted) {
  const labelled = wanted ? topics.map((_, k) => k).filter((k) => labels[k].toLowerCase().includes(wanted)) : [];
  const texts = wanted ? matchingDocuments(wanted) : [];
  const buttons = [
    ...labelled.map((k) => makeButton(nameOf(k), () => select(k), { dir: "auto" })),
    ...texts.map(({ topic, number, title }) => {
      const button = makeButton("", () => showDocument(topic, number), { title });
      button.append(isolated(title), make("span", { className: "quiet", textContent: ` in topic ${topic}` }));
      return button;
    }),
  ];
  byId("results").replaceChildren(...buttons.slice(0, MAX_RESULTS).map((button) => make("li", {}, button)));
  if (!wanted || !documents.length) return;
  const more = buttons.length > MAX_RESULTS ? `, the first ${MAX_RESULTS} matches are listed` : "";
  byId("found").append(`${state.word === null ? "; " : ", "}in ${texts.length ? count(texts.length, "typical document", "typical documents") : "no typical document"}${more}`);
}

/** Select the first match: the topic of the word, or the first labelled topic or document. */
function openFirstMatch() {
  if (state.word !== null) select(order[0]);
  else byId("results").querySelector("button")?.click();
}

byId("search").addEventListener("input", (event) => search(event.target.value));
byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") openFirstMatch(); });
