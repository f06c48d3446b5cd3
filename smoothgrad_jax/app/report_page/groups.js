// Prevalence of topics in groups of documents, or over time, with 95 % intervals: one chart per topic, and the numbers
// of the selected topic.

const { groups } = data; // null if the report was written without groups
const NUM_GROUPS = groups?.at ? 0 : 15; // rows of the selected topic, where a chart has no numbers; a button shows all
const NARROW = { width: 180, height: 64, left: 3, right: 177, top: 5, bottom: 61 }; // a chart in the overview

/** Horizontal position of each group, 0 to 1. */
const positions = groups && groups.values.map((_, g) => {
  if (!groups.at) return (g + 0.5) / groups.values.length;
  const [first, last] = [groups.at[0], groups.at.at(-1)];
  return (groups.at[g] - first) / (last - first);
});

const shareText = ([mean, low, high], g) => `${percent(mean[g])} (${percent(low[g])} – ${percent(high[g])})`;
const groupText = (k, g) =>
  `${groups.values[g]}: ${shareText(groups.topics[k], g)}, ${count(groups.docs[g], "document", "documents")}`;

/** Return the upper end of the scale for some topics. Wide intervals of small groups are cut. */
function scaleEnd(ks) {
  const highest = (i) => Math.max(...ks.map((k) => Math.max(...groups.topics[k][i])));
  return Math.min(highest(2), 2.5 * highest(0)) || 1;
}

/** Draw means and intervals of a topic: a line with a band over time, otherwise points with bars. */
function drawShares(svg, k, area, end) {
  const [mean, low, high] = groups.topics[k];
  const x = (g) => (area.left + positions[g] * (area.right - area.left)).toFixed(1);
  const y = (p) => (area.bottom - Math.min(1, p / end) * (area.bottom - area.top)).toFixed(1);
  const all = mean.map((_, g) => g);
  if (groups.at) {
    const outline = [...all.map((g) => `${x(g)} ${y(high[g])}`), ...all.toReversed().map((g) => `${x(g)} ${y(low[g])}`)];
    svg.append(draw("path", { class: "band", d: `M${outline.join("L")}Z` }));
    svg.append(draw("path", { class: "line", d: `M${all.map((g) => `${x(g)} ${y(mean[g])}`).join("L")}` }));
  } else {
    svg.append(draw("path", { class: "interval", d: all.map((g) => `M${x(g)} ${y(low[g])}V${y(high[g])}`).join("") }));
    svg.append(draw("path", { class: "points", d: all.map((g) => `M${x(g)} ${y(mean[g])}h0`).join("") }));
  }
}

/** Return the group nearest to the pointer. */
function groupAt(event, svg, area) {
  const box = svg.getBoundingClientRect();
  const position = (((event.clientX - box.left) * area.width) / box.width - area.left) / (area.right - area.left);
  const distance = positions.map((each) => Math.abs(each - position));
  return distance.indexOf(Math.min(...distance));
}

// ---- selected topic ----

function showGroups() {
  if (!groups) return;
  byId("over-time").hidden = !groups.at;
  if (groups.at) showTimeChart();
  const [mean, low, high] = groups.topics[state.topic];
  const end = scaleEnd([state.topic]);
  // The topic's prevalence weighs documents by their length, so that all groups can be below it.
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const overall = sum(mean.map((share, g) => share * groups.docs[g])) / sum(groups.docs);
  const ordered = mean.map((_, g) => g);
  if (!groups.at) ordered.sort((a, b) => mean[b] - mean[a] || a - b);
  const width = (p) => `${Math.min(100, (100 * p) / end)}%`;
  const lines = ordered.slice(0, state.allGroups ? Infinity : NUM_GROUPS).map((g) => {
    const bar = make("span", { className: "bar", title: groupText(state.topic, g) },
      make("i", { className: "own" }), make("i", { className: "whisker" }), make("i", { className: "corpus" }));
    const [own, whisker, corpus] = bar.children;
    own.style.width = width(mean[g]);
    whisker.style.left = width(low[g]);
    whisker.style.width = width(Math.min(high[g], end) - low[g]);
    corpus.style.left = width(overall);
    return make("li", {}, make("span", { className: "value", dir: "auto", textContent: groups.values[g], title: groups.values[g] }), bar,
      make("span", { className: "share numbers", textContent: shareText(groups.topics[state.topic], g) }),
      make("span", { className: "quiet numbers docs", textContent: integer(groups.docs[g]), title: "documents" }));
  });
  byId("group-rows").replaceChildren(...lines);
  byId("all-groups").hidden = mean.length <= NUM_GROUPS;
  byId("all-groups").textContent = state.allGroups ? "Fewer numbers" : `Numbers of all ${mean.length} groups`;
  byId("all-groups").setAttribute("aria-expanded", state.allGroups);
}

/** Draw the chart of the selected topic over time, in the width of the panel. */
function showTimeChart() {
  const svg = byId("time-chart");
  const width = Math.max(240, svg.parentElement.clientWidth);
  const area = { width, left: 46, right: width - 16, top: 10, bottom: 150 };
  const end = scaleEnd([state.topic]);
  svg.setAttribute("viewBox", `0 0 ${width} 176`);
  svg.replaceChildren();
  for (const p of ticks(0, end, 6)) {
    const y = area.bottom - (p / end) * (area.bottom - area.top);
    svg.append(draw("line", { class: "axis", x1: area.left, x2: area.right, y1: y, y2: y }));
    svg.append(draw("text", { x: area.left - 7, y: y + 4, "text-anchor": "end" }, percent(p)));
  }
  let free = -Infinity; // where the next label does not overlap the last one
  groups.values.forEach((value, g) => {
    const x = area.left + positions[g] * (area.right - area.left);
    if (x < free) return;
    svg.append(draw("text", { x, y: area.bottom + 18, "text-anchor": "middle" }, value));
    free = x + 64;
  });
  drawShares(svg, state.topic, area, end);
  const last = groups.values.length - 1;
  const read = (g) => { byId("time-reading").textContent = groupText(state.topic, g); };
  svg.setAttribute("aria-label", `Prevalence of topic ${state.topic} over time; a button below shows the numbers`);
  svg.onpointermove = (event) => read(groupAt(event, svg, area));
  svg.onpointerleave = () => read(last);
  read(last);
}

// ---- overview: one chart per topic ----

const multiples = (groups ? topics : []).map((_, k) => {
  const svg = draw("svg", { viewBox: `0 0 ${NARROW.width} ${NARROW.height}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  const item = make("li", {}, make("span", { className: "caption" }), svg, make("span", { className: "quiet numbers" }));
  item.setAttribute("role", "option");
  item.addEventListener("click", () => { select(k); byId("by-group").scrollIntoView({ block: "center" }); });
  svg.addEventListener("pointermove", (event) => {
    byId("groups-reading").textContent = `${nameOf(k)}, ${groupText(k, groupAt(event, svg, NARROW))}`;
  });
  return item;
});

function showMultiples() {
  const common = byId("same-scale").checked ? scaleEnd(topics.map((_, k) => k)) : null;
  multiples.forEach((item, k) => {
    const end = common ?? scaleEnd([k]);
    const [, svg, range] = item.children;
    range.textContent = `0 to ${percent(end)}`;
    svg.replaceChildren();
    drawShares(svg, k, NARROW, end);
  });
}

function showGroupNames() {
  multiples.forEach((item, k) => {
    item.firstChild.replaceChildren(make("b", { textContent: `${k} ` }), isolated(labels[k] || relevantWords[k].slice(0, 3).join(" ")));
  });
}

function showGroupOrder() {
  byId("multiples").replaceChildren(...order.map((k) => multiples[k]).filter((item) => item));
}

if (groups) {
  const field = () => isolated(groups.field);
  byId("groups").hidden = byId("by-group").hidden = false;
  byId("groups-title").append("Prevalence by ", field(), ", per topic");
  byId("by-group-title").append("Prevalence by ", field());
  byId("groups-note").append(
    groups.at ? `From ${groups.values[0]} to ${groups.values.at(-1)}: mean and 95 % interval. `
      : `${count(groups.values.length, "group", "groups")}, from ${groups.values[0]} on the left to ${groups.values.at(-1)} on the right: mean and 95 % interval. `,
    groups.remark);
  byId("by-group-note").textContent = groups.at ? "" : "Mean, 95 % interval, documents. Dashed line: the mean of all these documents.";
  byId("same-scale").addEventListener("change", showMultiples);
  byId("all-groups").addEventListener("click", () => { state.allGroups = !state.allGroups; showGroups(); });
  if (groups.at) addEventListener("resize", showTimeChart);
  showMultiples();
  showGroupNames();
}
