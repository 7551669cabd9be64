// Pictures of a month: stacked bars and lines by day; a line of the last minutes.

import { draw, make, whole } from "./frame.js";

const COLOURS = 8, WIDTH = 560, HEIGHT = 210, LEFT = 52, BOTTOM = 20, TOP = 8;

function steps(top) {
  if (!top) return [0, 1];
  const rough = top / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, index) => index * step);
}

function frame(place, days, top, show, label, empty = "nothing in this month") {
  const marks = steps(top), high = marks[marks.length - 1];
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / high);
  const slot = (WIDTH - LEFT) / days.length;
  for (const mark of marks) {
    svg.append(draw("line", { x1: LEFT, x2: WIDTH, y1: y(mark), y2: y(mark), stroke: "var(--line)", "stroke-width": 1 }));
    if (top || !mark) svg.append(draw("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, show(mark)));
  }
  days.forEach((day, index) => {
    if (index % 5 === 0) svg.append(draw("text", { x: LEFT + slot * (index + .5), y: HEIGHT - 5, "text-anchor": "middle" }, String(Number(day.slice(8)))));
  });
  if (!top) svg.append(draw("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, empty));
  place.replaceChildren(svg);
  return { svg, y, slot };
}

function legend(place, names, colours) {
  if (names.length) place.append(make("ul", { class: "legend" }, names.map((name, index) =>
    make("li", { dir: "auto" }, make("i", { class: `f${colours[index]}` }), name || "(none)"))));
}

// Stacked bars of days; the names with most weight have colours of their own, in every picture the same.
export function bars(place, days, rows, { by, weight, value, show, label, fixed, empty }) {
  const sums = new Map();
  for (const row of rows) sums.set(row[by], (sums.get(row[by]) || 0) + weight(row));
  let names = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
  const rest = !fixed && names.length > COLOURS ? new Set(names.slice(COLOURS - 1)) : new Set();
  if (rest.size) names = [...names.slice(0, COLOURS - 1), `${rest.size} others`];
  const colours = names.map((each, index) => fixed ? fixed[each] ?? 7 : index);
  const stacks = new Map();
  for (const row of rows) {
    const stack = stacks.get(row.day) || new Map(), of = rest.has(row[by]) ? names[COLOURS - 1] : row[by];
    stack.set(of, (stack.get(of) || 0) + value(row));
    stacks.set(row.day, stack);
  }
  const top = Math.max(0, ...[...stacks.values()].map((stack) => [...stack.values()].reduce((a, b) => a + b, 0)));
  const { svg, y, slot } = frame(place, days, top, show, label, empty);
  days.forEach((day, index) => {
    let base = 0;
    names.forEach((each, number) => {
      const size = stacks.get(day)?.get(each) || 0;
      if (!size) return;
      svg.append(draw("rect", { x: LEFT + slot * (index + .12), width: slot * .76, y: y(base + size), height: Math.max(.5, y(base) - y(base + size)), fill: `var(--c${colours[number]})` },
        draw("title", {}, `${day}, ${each || "(none)"}: ${show(size)}`)));
      base += size;
    });
  });
  if (top) legend(place, names, colours);
}

export function quantiles(place, days, rows, span, show) {
  const names = ["p50", "p90", "p95", "p99"], colours = [2, 0, 1, 4];
  const byDay = new Map(rows.map((row) => [row.day, row[span]]));
  const top = Math.max(0, ...rows.map((row) => row[span].p99));
  const { svg, y, slot } = frame(place, days, top, show, "Quantiles of latency by day");
  names.forEach((name, number) => {
    let path = "", pen = "M";
    days.forEach((day, index) => {
      const point = byDay.get(day);
      if (!point || !point.count) { pen = "M"; return; }
      const x = LEFT + slot * (index + .5);
      path += `${pen}${x.toFixed(1)} ${y(point[name]).toFixed(1)}`;
      pen = "L";
      svg.append(draw("circle", { cx: x, cy: y(point[name]), r: 3, fill: `var(--c${colours[number]})` },
        draw("title", {}, `${day}, ${name}: ${show(point[name])} (${whole(point.count)} samples)`)));
    });
    if (path) svg.append(draw("path", { d: path, fill: "none", stroke: `var(--c${colours[number]})`, "stroke-width": 2, "stroke-linejoin": "round" }));
  });
  if (top) legend(place, names, colours);
}

// A line of values, newest last; gaps where nothing is known.
export function sparkline(svg, values, most) {
  const width = 120, height = 24, high = Math.max(1, ...values.filter((value) => value !== null));
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${(width * (1 - (values.length - 1 - index) / (most - 1))).toFixed(1)} ${(height - 1 - (height - 3) * value / high).toFixed(1)}`;
    pen = "L";
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(draw("path", { d: path || "M0 0", fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }));
}
