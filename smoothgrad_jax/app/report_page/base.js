"use strict";
// The data of the page, the selection, and how elements and numbers are made. Strings of the model are inserted as text
// (textContent), never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { topics, words, counts, marginal } = data;
const K = topics.length;
const scored = topics.every((topic) => topic.npmi !== null);
const DEFAULT_MU = 0.6; // recommended by the user study of LDAvis
const byId = (id) => document.getElementById(id);

/**
 * The selection: topic and position of the slider (μ), order of the list, text of the search, word of the search,
 * word under the pointer, and whether all words and all groups of the topic are shown.
 */
const state = {
  topic: 0, mu: DEFAULT_MU, sort: "prevalence", query: "", word: null, hovered: null, all: false, allGroups: false,
};
let order = []; // topics in the order of the list
let pointed = null; // topic under the pointer, in the map or in the list

// ---- elements ----

/** Create an HTML element; children that are strings become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

/** Create a button. */
function makeButton(text, onClick, properties = {}) {
  const button = make("button", { type: "button", textContent: text, ...properties });
  button.addEventListener("click", onClick);
  return button;
}

/** Create an SVG element. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Isolate the writing direction of a text from the surrounding text. */
const isolated = (text, className = "") => make("bdi", { className, textContent: text });

/** Return elements or texts with a separator between them. */
const joined = (parts, separator) => parts.flatMap((part, i) => (i ? [separator, part] : [part]));

/** Return the text in pieces, with the parts that match the search in <mark>. */
function marked(text) {
  const query = state.query.trim();
  if (!query) return [text];
  const pattern = new RegExp(`(${query.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")})`, "giu");
  return text.split(pattern).map((part, i) => (i % 2 ? make("mark", { textContent: part }) : part));
}

/** Let exactly one of some elements be reached with Tab; the arrow keys move between them. */
function setTabStop(elements, chosen) {
  for (const [i, element] of elements.entries()) {
    element.setAttribute("aria-selected", i === chosen);
    element.tabIndex = i === chosen ? 0 : -1;
  }
}

// ---- formats ----

const integer = (number) => Math.round(number).toLocaleString("en");
const count = (number, one, many) => `${integer(number)} ${number === 1 ? one : many}`;
const minus = (text) => text.replace("-", "−");
const coherence = (topic) => minus(topic.npmi.toFixed(2));

function percent(proportion) {
  const value = 100 * proportion;
  if (value >= 9.95) return `${value.toFixed(0)}%`;
  if (value >= 0.0995) return `${value.toFixed(value >= 0.995 ? 1 : 2)}%`;
  return value >= 0.00095 ? `${value.toPrecision(1)}%` : value > 0 ? "< 0.001%" : "0%";
}

const times = (lift) => `× ${lift >= 99.5 ? integer(lift) : lift >= 9.95 ? lift.toFixed(0) : lift.toFixed(lift >= 0.095 ? 1 : 2)}`;

/** Return about `number` tick positions in an interval, at multiples of 1, 2 or 5 times a power of ten. */
function ticks(low, high, number) {
  const rough = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const values = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) values.push(Number((i * step).toPrecision(12)));
  return values;
}
