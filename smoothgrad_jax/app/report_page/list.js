// List of topics: its rows and its orders.

/** Orders of the list: name in the menu, and how topics compare; equal topics are in the order of their numbers. */
const byPrevalence = (a, b) => topics[b].prevalence - topics[a].prevalence;
const numRemarks = (k) => (topics[k].junk ? 1 : 0) + topics[k].duplicates.length;
const ORDERS = {
  prevalence: { name: "Prevalence", compare: byPrevalence },
  number: { name: "Number", compare: (a, b) => a - b },
  ...(scored && {
    npmi: { name: "NPMI, highest first", compare: (a, b) => topics[b].npmi - topics[a].npmi },
    "npmi-lowest": { name: "NPMI, lowest first", compare: (a, b) => topics[a].npmi - topics[b].npmi },
    remarks: { name: "Junk and near-duplicates first", compare: (a, b) => numRemarks(b) - numRemarks(a) || byPrevalence(a, b) },
  }),
  ...(data.comparison && {
    similarity: { name: `Least similar to ${data.comparison.name} first`, compare: (a, b) => data.comparison.similarity[a] - data.comparison.similarity[b] },
  }),
  match: { name: "Match of the search", compare: (a, b) => shareOfWord(b) - shareOfWord(a) || byPrevalence(a, b) },
};

const shareOfWord = (k) => (state.word === null ? 0 : (topicsOfWord(state.word).get(k) ?? 0));

const rows = topics.map((topic, k) => {
  const row = make(
    "li",
    { id: `topic-${k}` },
    make("span", { className: "number numbers", textContent: k }),
    make("span", { className: "top" },
      make("b", { className: "label", dir: "auto" }),
      make("span", {}, ...joined(relevantWords[k].map((word) => isolated(word)), " "))),
    make("span", { className: "weight numbers" }),
    ...(scored ? [make("span", { className: "npmi numbers", textContent: coherence(topic), title: "NPMI: coherence of the top words" })] : []),
    ...(numRemarks(k) ? [make("span", { className: "remark", textContent: remarkOf(k) })] : []),
    make("span", { className: "meter" }, make("i")),
  );
  row.classList.toggle("remarked", numRemarks(k) > 0);
  row.setAttribute("role", "option");
  row.addEventListener("click", () => select(k));
  row.addEventListener("pointerenter", () => point(k));
  row.addEventListener("pointerleave", () => point(null));
  return row;
});

/** Return why a topic is junk and which topics nearly duplicate it, as text. */
function remarkOf(k) {
  const { junk, duplicates } = topics[k];
  return [...(junk ? [`junk: ${junk}`] : []), ...(duplicates.length ? [`near-duplicate of ${duplicates.join(", ")}`] : [])].join(" · ");
}

function showList() {
  const match = state.sort === "match";
  const weight = match ? shareOfWord : (k) => topics[k].prevalence;
  const { compare } = ORDERS[state.sort];
  order = topics.map((_, k) => k).sort((a, b) => compare(a, b) || a - b);
  const largest = Math.max(...order.map(weight)) || 1;
  for (const [k, row] of rows.entries()) {
    row.querySelector(".weight").textContent = match && !weight(k) ? "–" : percent(weight(k));
    row.querySelector("i").style.width = `${(100 * weight(k)) / largest}%`;
  }
  byId("topics").classList.toggle("match", match);
  byId("columns").textContent = `${match ? "of the word" : "prevalence"}\u2002NPMI`;
  byId("topics").replaceChildren(...order.map((k) => rows[k]));
  showGroupOrder();
  showPairOrder();
  showSelection();
}

function showSelection() {
  for (const items of [rows, multiples, pairs]) setTabStop(items, state.topic);
  const position = order.indexOf(state.topic);
  byId("previous").disabled = position === 0;
  byId("next").disabled = position === K - 1;
}

/** Scroll the list to a row, without scrolling the page. */
function scrollListTo(row) {
  const list = byId("topics");
  const top = row.offsetTop - list.offsetTop;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + row.offsetHeight > list.scrollTop + list.clientHeight) {
    list.scrollTop = top + row.offsetHeight - list.clientHeight;
  }
}

function setSort(sort) {
  state.sort = sort;
  byId("sort").value = sort;
  showList();
}

byId("sort").append(...Object.entries(ORDERS).map(([value, { name }]) => make("option", { value, textContent: name })));
byId("sort").addEventListener("change", (event) => setSort(event.target.value));
byId("sort").value = state.sort;
byId("topics").classList.toggle("scored", scored);
byId("columns").hidden = !scored;
