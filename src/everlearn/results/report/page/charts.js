// Charts: scatter plots and line plots as SVG, which can be read with the pointer or with arrow keys.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#a03030", "#7f7f7f"];
const MARKERS = [
  "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
  "M-4.5,-4.5h9v9h-9z",
  "M0,-6L5.5,4h-11z",
  "M0,-6L6,0L0,6L-6,0z",
  "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4z",
  "M0,6L5.5,-4h-11z",
];
const SVG_TAGS = ["svg", "g", "path", "line", "text", "circle", "polyline", "title"];
const WIDTH = 460, HEIGHT = 320, LEFT = 52, BOTTOM = 44, TOP = 14, RIGHT = 14;

function createElement(tag, attributes, ...children) {
  const element = SVG_TAGS.includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function color(i) { return COLORS[i % COLORS.length]; }
function marker(i) { return MARKERS[(i + Math.floor(i / COLORS.length)) % MARKERS.length]; }

function tickValues(low, high, isLogarithmic) {
  const values = [];
  if (isLogarithmic) {
    const multiples = high / low < 50 ? [1, 2, 5] : [1];
    for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.ceil(Math.log10(high)); exponent++)
      for (const multiple of multiples) {
        const value = multiple * 10 ** exponent;
        if (value >= low && value <= high) values.push(value);
      }
    return values;
  }
  const minimalStep = (high - low) / 5 || 1, unit = 10 ** Math.floor(Math.log10(minimalStep));
  const step = [1, 2, 5, 10].map((multiple) => multiple * unit).find((candidate) => candidate >= minimalStep);
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step)
    values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

// Maps values to pixels from start to end, with a margin.
function createScale(values, start, end, isLogarithmic) {
  let low = Math.min(...values), high = Math.max(...values);
  if (isLogarithmic) {
    low /= 1.2;
    high *= 1.2;
  } else {
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    low -= margin;
    high += margin;
  }
  const transform = isLogarithmic ? Math.log10 : (value) => value;
  const range = transform(high) - transform(low);
  const position = (value) => start + ((transform(value) - transform(low)) / range) * (end - start);
  return { position, ticks: tickValues(low, high, isLogarithmic) };
}

function formatShort(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3).replace(/\.?0+$/, "") + " G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3).replace(/\.?0+$/, "") + " M";
  if (size >= 1e4) return Math.round(value / 1e3) + " k";
  return String(+value.toPrecision(3));
}

function createAxes(x, y, [xLabel, yLabel], description) {
  const parts = [], middle = (TOP + HEIGHT - BOTTOM) / 2;
  for (const value of x.ticks) {
    const at = x.position(value);
    parts.push(
      createElement("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }),
      createElement("text", { x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, formatShort(value)),
    );
  }
  for (const value of y.ticks) {
    const at = y.position(value);
    parts.push(
      createElement("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: "axis" }),
      createElement("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, formatShort(value)),
    );
  }
  const labelStyle = { "text-anchor": "middle", class: "soft" };
  parts.push(
    createElement("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, ...labelStyle }, xLabel),
    createElement("text", { x: 14, y: middle, ...labelStyle, transform: `rotate(-90 14 ${middle})` }, yLabel),
  );
  const attributes = {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    tabindex: 0,
    "aria-label": description + ". Use the arrow keys to read the points.",
  };
  return createElement("svg", attributes, ...parts);
}

function showTooltip(text) {
  const tooltip = document.getElementById("tip");
  tooltip.hidden = !text;
  tooltip.textContent = text || "";
}

// Shows the text of a point under the pointer, or of one point after another by arrow keys.
function addTooltips(svg, points) {
  let selected = -1;
  const select = (i) => {
    if (points[selected]) points[selected].node.classList.remove("selected");
    selected = i;
    if (points[i]) points[i].node.classList.add("selected");
    showTooltip(points[i] ? points[i].text : "");
  };
  points.forEach((point, i) => {
    point.node.addEventListener("pointerenter", () => select(i));
    point.node.addEventListener("pointerleave", () => select(-1));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !points.length) return;
    event.preventDefault();
    select((selected + step + points.length) % points.length);
  });
  svg.addEventListener("blur", () => select(-1));
}

// points: [{x, y, style, text}]; options: {description, isLogarithmic, betterX: 1 if a high x is better, else -1}
function scatterPlot(points, labels, options) {
  const x = createScale(points.map((point) => point.x), LEFT, WIDTH - RIGHT, options.isLogarithmic);
  const y = createScale(points.map((point) => point.y), HEIGHT - BOTTOM, TOP);
  const svg = createAxes(x, y, labels, options.description);

  const front = paretoFront(points, options.betterX);
  const frontLine = front.map((point) => `${x.position(point.x)},${y.position(point.y)}`).join(" ");
  svg.append(createElement("polyline", { points: frontLine, class: "front" }));

  const drawn = points.map((point) => {
    const transform = `translate(${x.position(point.x)} ${y.position(point.y)})`;
    const attributes = { d: marker(point.style), transform, fill: color(point.style), "fill-opacity": 0.85 };
    return { text: point.text, node: createElement("path", attributes) };
  });
  svg.append(...drawn.map((point) => point.node));
  addTooltips(svg, drawn);
  return svg;
}

// The points that no other point exceeds in both coordinates; a high y is better.
function paretoFront(points, betterX) {
  const sorted = [...points].sort((a, b) => betterX * (b.x - a.x) || b.y - a.y), front = [];
  for (const point of sorted) if (!front.length || point.y > front[front.length - 1].y) front.push(point);
  return front;
}

// series: [{name, style, points: [[x, y], …]}]; options: {description, isLogarithmic}
function linePlot(series, labels, options) {
  const allPoints = series.flatMap((line) => line.points);
  const x = createScale(allPoints.map((point) => point[0]), LEFT, WIDTH - RIGHT);
  const y = createScale(allPoints.map((point) => point[1]), HEIGHT - BOTTOM, TOP, options.isLogarithmic);
  x.ticks = x.ticks.filter((value) => Number.isInteger(value));

  const svg = createAxes(x, y, labels, options.description), drawn = [];
  for (const { name, style, points } of series) {
    const line = points.map(([task, value]) => `${x.position(task)},${y.position(value)}`).join(" ");
    svg.append(createElement("polyline", { points: line, fill: "none", stroke: color(style), "stroke-width": 2 }));
    for (const [task, value] of points) {
      const transform = `translate(${x.position(task)} ${y.position(value)}) scale(.7)`;
      const node = createElement("path", { d: marker(style), transform, fill: color(style) });
      drawn.push({ text: `${name}: ${formatShort(value)} after task ${task}`, node });
    }
  }
  svg.append(...drawn.map((point) => point.node));
  addTooltips(svg, drawn);
  return svg;
}

// entries: [[name, style], …]
function createLegend(entries) {
  const items = entries.map(([name, style]) => {
    const symbol = createElement("path", { d: marker(style), fill: color(style) });
    const icon = createElement("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, symbol);
    return createElement("li", {}, icon, " " + name);
  });
  return createElement("ul", { class: "legend" }, ...items);
}
