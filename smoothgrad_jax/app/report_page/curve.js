// Held-out score after every pass.

function showCurve() {
  const curve = data.curve;
  byId("held-out").hidden = curve.length === 0;
  if (!curve.length) return;
  const svg = byId("curve");
  const area = { left: 52, right: 386, top: 20, bottom: 158 };
  const xs = curve.map(([passes]) => passes);
  const ys = curve.map(([, score]) => score);
  const [lowX, highX] = [Math.min(0, ...xs), Math.max(...xs) || 1];
  const margin = (Math.max(...ys) - Math.min(...ys)) * 0.06 || 0.05;
  const [lowY, highY] = [Math.min(...ys) - margin, Math.max(...ys) + margin];
  const toX = (x) => area.left + ((x - lowX) / (highX - lowX)) * (area.right - area.left);
  const toY = (y) => area.bottom - ((y - lowY) / (highY - lowY)) * (area.bottom - area.top);

  const yTicks = ticks(lowY, highY, 4);
  const digits = Math.max(0, ...yTicks.map((y) => (String(y).split(".")[1] ?? "").length));
  for (const y of yTicks) {
    svg.append(draw("line", { class: "axis", x1: area.left, x2: area.right, y1: toY(y), y2: toY(y) }));
    svg.append(draw("text", { x: area.left - 7, y: toY(y) + 4, "text-anchor": "end" }, minus(y.toFixed(digits))));
  }
  for (const x of ticks(lowX, highX, 5)) {
    svg.append(draw("text", { x: toX(x), y: area.bottom + 17, "text-anchor": "middle" }, String(x)));
  }
  svg.append(draw("text", { x: (area.left + area.right) / 2, y: area.bottom + 38, "text-anchor": "middle" }, "effective passes"));
  svg.append(draw("path", { class: "line", d: "M" + curve.map(([x, y]) => `${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("L") }));
  const [endX, endY] = curve.at(-1);
  const label = draw("text", { class: "last", x: area.right, y: Math.max(12, toY(endY) - 9), "text-anchor": "end" }, minus(endY.toFixed(3)));
  const dot = draw("circle", { class: "dot", r: 4 });
  svg.append(label, dot);
  svg.setAttribute("aria-label", `Held-out score, last ${endY.toFixed(3)} nats per word after ${endX} passes`);

  const read = (i) => {
    const [x, y, step] = curve[i];
    dot.setAttribute("cx", toX(x));
    dot.setAttribute("cy", toY(y));
    const atStep = step === null ? "" : `, step ${integer(step)}`;
    byId("reading").textContent = `${minus(y.toFixed(4))} nats per held-out word after ${x} ${x === 1 ? "pass" : "passes"}${atStep}. Higher is better.`;
  };
  read(curve.length - 1);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * 400) / box.width;
    const distance = xs.map((value) => Math.abs(toX(value) - x));
    read(distance.indexOf(Math.min(...distance)));
  });
  svg.addEventListener("pointerleave", () => read(curve.length - 1));
}

showCurve();
