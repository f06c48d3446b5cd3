// Actions, URL, theme, keys, and the start of the page.

// ---- actions ----

function select(k) {
  state.topic = k;
  state.allGroups = false;
  showSelection();
  showTopic();
  showGroups();
  showMatch();
  showMap();
  scrollListTo(rows[k]);
  writeUrl();
}

/** Select the topic `by` entries further down the list. In a list, the focus follows the selection. */
function step(by) {
  const list = document.activeElement.closest('[role="listbox"]');
  select(order[Math.min(K - 1, Math.max(0, order.indexOf(state.topic) + by))]);
  const item = list?.querySelector('[aria-selected="true"]');
  item?.focus({ preventScroll: list === byId("topics") });
}

// ---- URL: #topic=7&relevance=0.4&word=space ----

function writeUrl() {
  const parts = new URLSearchParams({ topic: state.topic });
  if (state.mu !== DEFAULT_MU) parts.set("relevance", state.mu);
  if (state.word !== null) parts.set("word", words[state.word]);
  history.replaceState(null, "", `#${parts}`);
}

function readUrl() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const [topic, mu] = [parts.get("topic"), parts.get("relevance")].map((text) => (text ? Number(text) : NaN));
  state.topic = Number.isInteger(topic) && topic >= 0 && topic < K ? topic : bySize[0];
  state.mu = mu >= 0 && mu <= 1 ? Math.round(mu * data.positions) / data.positions : DEFAULT_MU;
  const word = words.indexOf(parts.get("word") ?? "");
  showList();
  select(state.topic);
  if (word >= 0 || state.word !== null) search(word >= 0 ? words[word] : "");
}

// ---- theme ----

const dark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const isDark = (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  byId("theme").textContent = isDark ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${isDark ? "light" : "dark"} colours`);
  return isDark;
}

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = showTheme() ? "light" : "dark";
  showTheme();
});
dark.addEventListener("change", showTheme);

// ---- keys and pointers ----

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    search("");
    highlight(null);
    if (document.activeElement === byId("search")) byId("search").blur();
    return;
  }
  if (event.target.matches("input, select")) return; // these have their own keys
  const option = event.target.closest('[role="option"]');
  if (option && [" ", "Enter"].includes(event.key)) {
    option.click();
    event.preventDefault();
    return;
  }
  const moves = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1, ...(option && { ArrowDown: 1, ArrowUp: -1, Home: -K, End: K }) };
  if (event.key in moves) step(moves[event.key]);
  else if (event.key === "/") byId("search").focus();
  else return;
  event.preventDefault();
});

byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
addEventListener("hashchange", readUrl);

// ---- start ----

byId("title").textContent = data.title;
byId("facts").textContent = [
  count(K, "topic", "topics"),
  count(data.num_words, "word", "words"),
  count(data.num_docs, "document", "documents"),
].join(" · ");
for (const list of ["quality", "settings"]) {
  for (const [name, value] of data[list]) {
    byId(list).append(make("dt", { textContent: name }), make("dd", { textContent: value, dir: "auto" }));
  }
}
for (const [id, name] of [["topic", "Topic"], ["groups", "Groups"], ["comparison", "Comparison"]]) {
  const panel = byId(id);
  const show = () => { panel.scrollIntoView(); panel.focus({ preventScroll: true }); };
  if ((groups || comparison) && !panel.hidden) byId("panels").append(makeButton(name, show, { className: "plain" }));
}
showTheme();
readUrl();
byId("sort").querySelector('[value="match"]').disabled = state.word === null;
showLabels();
