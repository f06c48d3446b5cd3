// Labels: the names that people give to topics. They are edited here, and stored in the model with
// `smoothgrad topics MODEL --labels labels.tsv`.

const MAX_LABEL = 80; // characters, as in smoothgrad_jax/app/topic_labels.py, which reads the file
// Control characters, lone surrogates, line separators, and characters that change the direction of the text around.
const NOT_SHOWN = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\u202a-\u202e\u2066-\u2069]/gu;

const labels = topics.map((topic) => topic.label ?? "");
let unsaved = false; // whether a label was edited after the last download

/** Return the name of a topic: its number and its label. */
const nameOf = (k) => (labels[k] ? `Topic ${k}: ${labels[k]}` : `Topic ${k}`);

function setLabel(k, text) {
  const label = [...text.replace(NOT_SHOWN, " ").trim()].slice(0, MAX_LABEL).join("").trim();
  if (label === labels[k]) return;
  labels[k] = label;
  unsaved = true;
  showLabels();
}

/** Show the labels wherever topics are named. */
function showLabels() {
  rows.forEach((row, k) => { row.querySelector(".label").textContent = labels[k]; });
  showLabelField();
  showMap();
  showGroupNames();
  showPairs();
}

function showLabelField() {
  const [field, given] = [byId("label"), labels.filter((label) => label).length];
  field.value = labels[state.topic];
  field.setAttribute("aria-label", `Label of topic ${state.topic}`);
  byId("download").disabled = !unsaved && given === 0;
  byId("label-note").hidden = !unsaved;
  byId("label-note").textContent =
    `${count(given, "label", "labels")}, edited in this page only. Download the file, then store it in the model: ` +
    "smoothgrad topics MODEL --labels labels.tsv";
}

/** Save the labels as lines of topic number, tab and label. */
function downloadLabels() {
  const lines = labels.map((label, k) => (label ? `${k}\t${label}\n` : "")).join("");
  const url = URL.createObjectURL(new Blob([`topic\tlabel\n${lines}`], { type: "text/tab-separated-values" }));
  make("a", { href: url, download: "labels.tsv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  unsaved = false;
  showLabelField();
}

byId("label").maxLength = MAX_LABEL;
byId("label").addEventListener("change", (event) => setLabel(state.topic, event.target.value));
byId("label").addEventListener("keydown", (event) => {
  if (event.key === "Enter") setLabel(state.topic, event.target.value);
  else if (event.key === "Escape") event.target.value = labels[state.topic];
  else return;
  event.stopPropagation(); // Escape does not clear the search
});
byId("download").addEventListener("click", downloadLabels);
addEventListener("beforeunload", (event) => { if (unsaved) event.preventDefault(); });
