// Map of topics, which also shows the topics of a word.

const WIDTH = 400;
const HEIGHT = 320;
const MAX_RADIUS = 56;
const MAX_LABELS = 40; // labels outside of their circle
// The area of a circle is the prevalence of the topic, or p(k|w) of a word. `unit` is the radius for prevalence 1.
const unit = Math.min(84, MAX_RADIUS / Math.sqrt(Math.max(...topics.map((topic) => topic.prevalence))));
const radius = (proportion, scale = unit) => scale * Math.sqrt(proportion);

const centres = (() => {
  const pad = Math.max(20, 8 + radius(Math.max(...topics.map((topic) => topic.prevalence))));
  const [low, high] = [Math.min, Math.max].map((f) => [0, 1].map((axis) => f(...topics.map((t) => t.at[axis]))));
  // Both axes have the same scale, because the map shows distances. A single topic has no extent.
  const scale = Math.min((WIDTH - 2 * pad) / (high[0] - low[0] || 1e-9), (HEIGHT - 2 * pad) / (high[1] - low[1] || 1e-9));
  const middle = low.map((value, axis) => (value + high[axis]) / 2);
  return topics.map(({ at }) => ({
    x: WIDTH / 2 + (K > 1 ? scale * (at[0] - middle[0]) : 0),
    y: HEIGHT / 2 - (K > 1 ? scale * (at[1] - middle[1]) : 0),
  }));
})();

const circles = centres.map(({ x, y }) => draw("circle", { cx: x.toFixed(2), cy: y.toFixed(2) }));
const numbers = centres.map(({ x }, k) => draw("text", { x: x.toFixed(2) }, String(k)));
const bySize = topics.map((_, k) => k).sort((a, b) => topics[b].prevalence - topics[a].prevalence || a - b);
byId("map").append(...bySize.map((k) => circles[k]), ...numbers); // small circles are drawn above large circles

function showMap() {
  const word = state.hovered ?? state.word;
  const probabilities = word === null ? null : topicsOfWord(word);
  const weight = (k) => (probabilities ? (probabilities.get(k) ?? 0) : topics[k].prevalence);
  byId("map").classList.toggle("word", probabilities !== null);
  // Labels of the selected topic and of the largest topics are shown unless they overlap.
  const labelled = [];
  const first = [pointed, state.topic].filter((k) => k !== null);
  for (const k of [...first, ...topics.map((_, k) => k).sort((a, b) => weight(b) - weight(a) || a - b)]) {
    if (labelled.some((other) => other.k === k)) continue;
    const { x } = centres[k];
    const size = weight(k) > 0 ? Math.max(2, radius(weight(k), probabilities ? MAX_RADIUS : unit)) : 0.8;
    const large = size > 8; // the label of a smaller circle is drawn above the circle
    const y = centres[k].y - (large ? 0 : size + 7);
    const free = labelled.every((other) => Math.abs(other.x - x) > 4 + 8 * String(k).length || Math.abs(other.y - y) > 13);
    const shown = (weight(k) > 0 && free && (large || labelled.length < MAX_LABELS)) || first.includes(k);
    if (shown) labelled.push({ k, x, y });
    numbers[k].style.display = shown ? "" : "none";
    numbers[k].setAttribute("y", y.toFixed(2));
    circles[k].setAttribute("r", size.toFixed(2));
    circles[k].classList.toggle("selected", k === state.topic);
    circles[k].classList.toggle("near", k === pointed);
    numbers[k].classList.toggle("selected", k === state.topic);
    numbers[k].classList.toggle("inside", large);
  }
  showNote(word, probabilities);
}

function showNote(word, probabilities) {
  const note = byId("note");
  if (pointed !== null) {
    note.replaceChildren(make("b", {}, isolated(nameOf(pointed))), ` · ${percent(topics[pointed].prevalence)} · `,
      ...joined(relevantWords[pointed].map((word) => isolated(word)), " "));
  } else if (probabilities) {
    const parts = [...probabilities].slice(0, 5).map(([k, p]) => `topic ${k} (${percent(p)})`);
    const more = probabilities.size > 5 ? " and others" : "";
    note.replaceChildren(make("b", {}, isolated(words[word], "word")), ` occurs in ${parts.join(", ") || "every topic with small probability"}${more}.`);
  } else if (K === 1) {
    note.replaceChildren("The map needs at least two topics.");
  } else {
    note.replaceChildren(
      `Area: prevalence. Close topics have similar words. Axes: the first two principal coordinates of the ` +
      `Jensen–Shannon distances, which explain ${percent(data.explained)} of the squared distances.`,
    );
  }
}

/** Return the topic at the pointer: the smallest circle that contains it, otherwise the nearest centre. */
function topicAt(event) {
  const box = byId("map").getBoundingClientRect();
  const x = ((event.clientX - box.left) * WIDTH) / box.width;
  const y = ((event.clientY - box.top) * HEIGHT) / box.height;
  const distance = centres.map((centre) => Math.hypot(centre.x - x, centre.y - y));
  const containing = bySize.filter((k) => distance[k] <= radius(topics[k].prevalence));
  if (containing.length) return containing.at(-1);
  const nearest = distance.indexOf(Math.min(...distance));
  return distance[nearest] < 14 ? nearest : null;
}

function point(k) {
  if (k === pointed) return;
  pointed = k;
  showMap();
}

byId("map").addEventListener("pointermove", (event) => point(topicAt(event)));
byId("map").addEventListener("pointerleave", () => point(null));
byId("map").addEventListener("click", (event) => { const k = topicAt(event); if (k !== null) select(k); });
