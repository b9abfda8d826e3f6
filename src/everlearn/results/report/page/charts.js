// Drawing: scatter plots and lines as SVG, read by pointer or arrow keys.
const INKS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#a03030", "#7f7f7f"];
const MARKS = ["M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "M-4.5,-4.5h9v9h-9z", "M0,-6L5.5,4h-11z", "M0,-6L6,0L0,6L-6,0z", "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4z", "M0,6L5.5,-4h-11z"];
const WIDE = 460, HIGH = 320, LEFT = 52, BOTTOM = 44, TOP = 14, RIGHT = 14;

function make(tag, attributes, ...inside) {
  const drawn = ["svg", "g", "path", "line", "text", "circle", "polyline", "title"].includes(tag);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...inside.filter((part) => part !== null && part !== undefined));
  return node;
}

function ink(i) { return INKS[i % INKS.length]; }
function mark(i) { return MARKS[(i + Math.floor(i / INKS.length)) % MARKS.length]; }

function ticks(low, high, logarithmic) {
  if (logarithmic) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of high / low < 50 ? [1, 2, 5] : [1]) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
    return found;
  }
  const raw = (high - low) / 5 || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function scale(values, from, to, logarithmic) {
  let low = Math.min(...values), high = Math.max(...values);
  if (logarithmic) { low /= 1.2; high *= 1.2; } else { const room = (high - low || Math.abs(high) || 1) * 0.06; low -= room; high += room; }
  const f = logarithmic ? Math.log10 : (v) => v;
  const at = (v) => from + ((f(v) - f(low)) / (f(high) - f(low))) * (to - from);
  return { at, ticks: ticks(low, high, logarithmic) };
}

function short(v) {
  const size = Math.abs(v);
  if (size >= 1e9) return (v / 1e9).toPrecision(3).replace(/\.?0+$/, "") + " G";
  if (size >= 1e6) return (v / 1e6).toPrecision(3).replace(/\.?0+$/, "") + " M";
  if (size >= 1e4) return Math.round(v / 1e3) + " k";
  return String(+v.toPrecision(3));
}

function frame(x, y, names, label) {
  const parts = [];
  for (const v of x.ticks) parts.push(make("line", { x1: x.at(v), x2: x.at(v), y1: TOP, y2: HIGH - BOTTOM, class: "axis" }), make("text", { x: x.at(v), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, short(v)));
  for (const v of y.ticks) parts.push(make("line", { x1: LEFT, x2: WIDE - RIGHT, y1: y.at(v), y2: y.at(v), class: "axis" }), make("text", { x: LEFT - 6, y: y.at(v) + 4, "text-anchor": "end" }, short(v)));
  parts.push(make("text", { x: (LEFT + WIDE - RIGHT) / 2, y: HIGH - 8, "text-anchor": "middle", class: "soft" }, names[0]));
  parts.push(make("text", { x: 14, y: (TOP + HIGH - BOTTOM) / 2, "text-anchor": "middle", class: "soft", transform: `rotate(-90 14 ${(TOP + HIGH - BOTTOM) / 2})` }, names[1]));
  return make("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", tabindex: 0, "aria-label": label + ". Arrow keys read the points." }, ...parts);
}

function tell(text) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  tip.textContent = text || "";
}

// Points that speak: under the pointer, or one after the other by arrow keys.
function speaking(svg, marks) {
  let now = -1;
  const light = (i) => {
    if (marks[now]) marks[now].node.classList.remove("lit");
    now = i;
    if (marks[i]) marks[i].node.classList.add("lit");
    tell(marks[i] ? marks[i].text : "");
  };
  marks.forEach((m, i) => {
    m.node.addEventListener("pointerenter", () => light(i));
    m.node.addEventListener("pointerleave", () => light(-1));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !marks.length) return;
    event.preventDefault();
    light((now + step + marks.length) % marks.length);
  });
  svg.addEventListener("blur", () => light(-1));
}

// points: [{x, y, kind, text}]
function scatter(points, names, options = {}) {
  const x = scale(points.map((p) => p.x), LEFT, WIDE - RIGHT, options.log), y = scale(points.map((p) => p.y), HIGH - BOTTOM, TOP);
  const svg = frame(x, y, names, options.label);
  if (options.front) {
    const line = front(points, options.front).map((p) => `${x.at(p.x)},${y.at(p.y)}`).join(" ");
    svg.append(make("polyline", { points: line, class: "front" }));
  }
  const marks = points.map((p) => ({ text: p.text, node: make("path", { d: mark(p.kind), transform: `translate(${x.at(p.x)} ${y.at(p.y)})`, fill: ink(p.kind), "fill-opacity": 0.85 }) }));
  svg.append(...marks.map((m) => m.node));
  speaking(svg, marks);
  return svg;
}

// The points that no other beats in both: y high, x high (1) or low (-1).
function front(points, sign) {
  const sorted = [...points].sort((a, b) => sign * (b.x - a.x) || b.y - a.y), best = [];
  for (const p of sorted) if (!best.length || p.y > best[best.length - 1].y) best.push(p);
  return best;
}

// series: [{name, kind, points: [[x, y], …]}]
function lines(series, names, options = {}) {
  const flat = series.flatMap((s) => s.points);
  const x = scale(flat.map((p) => p[0]), LEFT, WIDE - RIGHT), y = scale(flat.map((p) => p[1]), HIGH - BOTTOM, TOP, options.log);
  x.ticks = x.ticks.filter((v) => Number.isInteger(v));
  const svg = frame(x, y, names, options.label), marks = [];
  for (const s of series) {
    svg.append(make("polyline", { points: s.points.map((p) => `${x.at(p[0])},${y.at(p[1])}`).join(" "), fill: "none", stroke: ink(s.kind), "stroke-width": 2 }));
    for (const p of s.points) marks.push({ text: `${s.name}: ${short(p[1])} after task ${p[0]}`, node: make("path", { d: mark(s.kind), transform: `translate(${x.at(p[0])} ${y.at(p[1])}) scale(.7)`, fill: ink(s.kind) }) });
  }
  svg.append(...marks.map((m) => m.node));
  speaking(svg, marks);
  return svg;
}

function legend(kinds) {
  return make("ul", { class: "legend" }, ...kinds.map(([name, i]) => make("li", {}, make("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, make("path", { d: mark(i), fill: ink(i) })), " " + name)));
}
