// The report: embedded data in, sections out. Names given by users are only ever inserted as text.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const METHODS = unique(RUNS.map((run) => run.method));
const STYLE = Object.fromEntries(METHODS.map((method, i) => [method, i]));
const TEXT_COLUMNS = ["method", "stream", "scenario"];
const COSTS = ["seconds", "state bytes", "peak bytes", "parameters"];
const COLUMNS = [ // key of a run, title, 1 if high is better or -1 if low is better
  ["method", "method"],
  ["scenario", "scenario"],
  ["average", "average", 1],
  ["overall", "overall", 1],
  ["forgetting", "forgetting", -1],
  ["learning", "learning", 1],
  ["backward transfer", "backward", 1],
  ["seconds", "seconds", -1],
  ["state bytes", "state KB", -1],
  ["parameters", "parameters", -1],
  ["seeds", "seeds"],
  ["stream", "stream"],
];

// Filters and sorting, kept in the browser's session so that a page that reloads itself does not lose them.
const view = { stream: "", scenario: "", hidden: new Set(), sort: "average", isDescending: true, cost: "seconds" };
try {
  const saved = JSON.parse(sessionStorage.getItem("everlearn") || "{}");
  Object.assign(view, saved, { hidden: new Set(saved.hidden || []) });
} catch {
  view.hidden = new Set();
}

function saveView() {
  try {
    sessionStorage.setItem("everlearn", JSON.stringify({ ...view, hidden: [...view.hidden] }));
  } catch {
    // The browser has no session storage.
  }
}

// Data.
function unique(values) { return [...new Set(values)]; }
function present(values) { return values.filter((value) => value !== null && value !== undefined); }
function mean(values) { return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null; }
function standardDeviation(values) {
  if (values.length < 2) return null;
  const center = mean(values), squares = values.reduce((sum, value) => sum + (value - center) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1));
}
function isAccuracy(run) { return run.score === "accuracy"; }
function percentFactor(run) { return isAccuracy(run) ? 100 : 1; }
function setting(run) { return `${run.stream}, ${run.scenario}-incremental`; }
function describe(run) { return `${run.method}, ${setting(run)}, seed ${run.seed}`; }
function isImportance(name) { return name.startsWith("importance"); }
function formatScore(run, value) {
  if (value === null) return "–";
  return isAccuracy(run) ? (100 * value).toFixed(1) : String(+value.toPrecision(4));
}
function visibleRuns() {
  return RUNS.filter((run) =>
    (!view.stream || run.stream === view.stream)
    && (!view.scenario || run.scenario === view.scenario)
    && !view.hidden.has(run.method));
}
function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    const value = key(item);
    if (!groups.has(value)) groups.set(value, []);
    groups.get(value).push(item);
  }
  return groups;
}
// The mean over seeds of a table, such as the accuracy matrix; the shortest table limits the rows.
function meanMatrix(runs) {
  const matrices = runs.map((run) => run.matrix).filter((matrix) => matrix.length);
  if (!matrices.length) return [];
  const rowCount = Math.min(...matrices.map((matrix) => matrix.length));
  return Array.from({ length: rowCount }, (_, i) =>
    matrices[0][i].map((_, j) => mean(present(matrices.map((matrix) => matrix[i][j])))));
}

// The summary table.
function summaryCell(runs, column) {
  const run = runs[0];
  if (column === "seeds") return { value: runs.length, text: String(runs.length) };
  if (TEXT_COLUMNS.includes(column)) return { value: run[column], text: run[column] };
  const values = present(runs.map((other) => other[column]));
  const center = mean(values), deviation = standardDeviation(values);
  if (center === null) return { value: null, text: "–" };
  if (column === "seconds") return { value: center, text: center.toFixed(1) };
  if (column === "state bytes") return { value: center, text: Math.round(center / 1024).toLocaleString("en") };
  if (column === "parameters") return { value: center, text: Math.round(center).toLocaleString("en") };
  const spread = deviation === null ? "" : ` ± ${formatScore(run, deviation)}`;
  return { value: center, text: formatScore(run, center) + spread };
}
// The best value of each column in each stream and scenario with several methods that differ.
function bestValues(rows) {
  const best = new Map();
  for (const [column, , sign] of COLUMNS.filter((definition) => definition[2]))
    for (const [name, group] of groupBy(rows, (runs) => setting(runs[0]))) {
      const values = present(group.map((runs) => summaryCell(runs, column).value));
      if (group.length > 1 && new Set(values).size > 1)
        best.set(column + "\n" + name, sign > 0 ? Math.max(...values) : Math.min(...values));
    }
  return best;
}
function compareRows(a, b) {
  const first = summaryCell(a, view.sort).value, second = summaryCell(b, view.sort).value;
  if (first === null || second === null) return (first === null) - (second === null);
  const order = first < second ? -1 : first > second ? 1 : 0;
  return view.isDescending ? -order : order;
}
function sortBy(column) {
  view.isDescending = view.sort === column ? !view.isDescending : !TEXT_COLUMNS.includes(column);
  view.sort = column;
  draw(`button[data-sort="${column}"]`);
}
function summaryHeader([column, title]) {
  const direction = view.isDescending ? "descending" : "ascending";
  const attributes = {
    scope: "col",
    class: TEXT_COLUMNS.includes(column) ? "name" : "",
    "aria-sort": view.sort === column ? direction : "none",
  };
  const button = { type: "button", "data-sort": column, onclick: () => sortBy(column) };
  return createElement("th", attributes, createElement("button", button, title));
}
function summaryTable(runs) {
  const rows = [...groupBy(runs, (run) => JSON.stringify([run.stream, run.scenario, run.method])).values()];
  const best = bestValues(rows);
  rows.sort(compareRows);
  const body = rows.map((group) => createElement("tr", {}, ...COLUMNS.map(([column]) => {
    const { value, text } = summaryCell(group, column);
    if (column === "method") return createElement("th", { scope: "row" }, text);
    const isBest = value !== null && best.get(column + "\n" + setting(group[0])) === value;
    const cellClass = (TEXT_COLUMNS.includes(column) ? "name" : "") + (isBest ? " best" : "");
    const title = isBest ? "best of this stream and scenario" : null;
    return createElement("td", { class: cellClass, title }, text);
  })));
  const header = createElement("thead", {}, createElement("tr", {}, ...COLUMNS.map(summaryHeader)));
  const table = createElement("table", { class: "summary" }, header, createElement("tbody", {}, ...body));
  const region = { class: "wide", tabindex: 0, role: "region", "aria-label": "Summary table" };
  return createElement("div", region, table);
}

// Charts.
function tradeOffChart(runs) {
  const complete = runs.filter((run) => run["old tasks"] !== null && run.learning !== null);
  if (!complete.length) return null;
  const points = complete.map((run) => {
    const scores = `new tasks ${formatScore(run, run.learning)}, old tasks ${formatScore(run, run["old tasks"])}`;
    return {
      x: run.learning * percentFactor(run),
      y: run["old tasks"] * percentFactor(run),
      style: STYLE[run.method],
      text: `${describe(run)}: ${scores}`,
    };
  });
  const labels = ["accuracy on new tasks (plasticity)", "accuracy on old tasks (stability)"];
  const description = "Stability against plasticity, one point per run, the Pareto front dashed";
  return scatterPlot(points, labels, { betterX: 1, description });
}
function costChart(runs) {
  const complete = runs.filter((run) => run.average !== null && run[view.cost]);
  if (!complete.length) return null;
  const points = complete.map((run) => ({
    x: run[view.cost],
    y: run.average * percentFactor(run),
    style: STYLE[run.method],
    text: `${describe(run)}: ${formatScore(run, run.average)} with ${formatShort(run[view.cost])} ${view.cost}`,
  }));
  const labels = [view.cost + " (logarithmic)", "average accuracy"];
  const description = `Accuracy against ${view.cost}, one point per run, the Pareto front dashed`;
  return scatterPlot(points, labels, { betterX: -1, isLogarithmic: true, description });
}
function averageChart(runs) {
  const series = [...groupBy(runs, (run) => run.method)].map(([method, group]) => {
    const matrix = meanMatrix(group), { tasks } = group[0], factor = percentFactor(group[0]);
    const points = matrix.map((row, i) => [tasks[i], factor * mean(present(row.slice(0, i + 1)))]);
    return { name: method, style: STYLE[method], points };
  }).filter((line) => line.points.length > 1);
  if (!series.length) return null;
  const description = "Average accuracy over the tasks learned so far, by method";
  return linePlot(series, ["tasks learned", "average over tasks so far"], { description });
}
function taskChart(method, runs) {
  const matrix = meanMatrix(runs), { tasks } = runs[0], factor = percentFactor(runs[0]);
  if (matrix.length < 2) return null;
  const series = matrix[0].map((_, j) => {
    const points = [];
    for (let i = j; i < matrix.length; i++)
      if (matrix[i][j] !== null) points.push([tasks[i], factor * matrix[i][j]]);
    return { name: `task ${tasks[j]}`, style: j, points };
  }).filter((line) => line.points.length);
  const description = `${method}: accuracy on each task while later ones are learned`;
  const chart = linePlot(series, ["tasks learned", "accuracy on each task"], { description });
  return createElement("figure", {}, createElement("figcaption", {}, method), chart);
}
function accuracyMatrix(method, runs) {
  const matrix = meanMatrix(runs), run = runs[0], { tasks } = run, isJoint = matrix.length === 1;
  const hasNumbers = matrix[0].length <= 12, scores = present(matrix.flat());
  const high = isAccuracy(run) ? 1 : Math.max(...scores), low = isAccuracy(run) ? 0 : Math.min(...scores);
  const formatCell = (value) => {
    if (value === null) return "–";
    return isAccuracy(run) ? String(Math.round(100 * value)) : String(+value.toPrecision(2));
  };
  const cell = (value, i, j) => {
    const share = value === null ? 0 : Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
    const background = `hsl(212 ${Math.round(30 + 40 * share)}% ${Math.round(96 - 66 * share)}%)`;
    const attributes = {
      style: `background: ${background}; color: ${share > 0.72 ? "#fff" : "#000"}`,
      title: `task ${tasks[j]} after ${isJoint ? "all tasks" : `task ${tasks[i]}`}: ${formatScore(run, value)}`,
    };
    return createElement("td", attributes, hasNumbers ? formatCell(value) : "");
  };
  const columnTitles = matrix[0].map((_, j) =>
    createElement("th", { scope: "col" }, hasNumbers ? `${tasks[j]}` : ""));
  const header = createElement("tr", {}, createElement("td", { "aria-label": "after learning" }), ...columnTitles);
  const rows = matrix.map((row, i) => {
    const taskNumber = hasNumbers ? `${tasks[i]}` : "";
    const rowTitle = createElement("th", { scope: "row" }, isJoint ? "all" : taskNumber);
    return createElement("tr", {}, rowTitle, ...row.map((value, j) => cell(value, i, j)));
  });
  return createElement("table", { class: "heat" }, createElement("caption", {}, method), header, ...rows);
}
function lineFigure(title, series, yLabel, options) {
  if (!series.length) return null;
  const chart = linePlot(series, ["tasks learned", yLabel], options);
  const legend = createLegend(series.map((line) => [line.name, line.style]));
  return createElement("figure", {}, createElement("figcaption", {}, title), chart, legend);
}
function diagnosticNames(runs) {
  return unique(runs.flatMap((run) => run.diagnostics.flatMap((values) => Object.keys(values))));
}
function diagnosticCharts(runs) {
  return diagnosticNames(runs).filter((name) => !isImportance(name)).map((name) => {
    const series = [...groupBy(runs, (run) => run.method)].map(([method, group]) => {
      const reporting = group.filter((run) => run.diagnostics.some((values) => name in values));
      const points = !reporting.length ? [] : reporting[0].diagnostics.map((_, i) => {
        const values = reporting.map((run) => run.diagnostics[i] && run.diagnostics[i][name]);
        return [reporting[0].tasks[i], mean(present(values))];
      }).filter((point) => point[1] !== null);
      return { name: method, style: STYLE[method], points };
    }).filter((line) => line.points.length);
    return lineFigure(name, series, name, { description: `${name} over the stream, by method` });
  });
}
function importanceCharts(runs) {
  const reporting = runs.filter((run) => diagnosticNames([run]).some(isImportance));
  return [...groupBy(reporting, (run) => `${run.method}, ${setting(run)}`)].map(([title, [run]]) => {
    const series = diagnosticNames([run]).filter(isImportance).map((name, i) => {
      const points = run.diagnostics.map((values, t) => [run.tasks[t], values[name]]).filter((point) => point[1] > 0);
      return { name: name.replace("importance ", ""), style: i, points };
    }).filter((line) => line.points.length);
    const options = { isLogarithmic: true, description: `Quantiles of the importances of ${title}` };
    return lineFigure(title, series, "importance (logarithmic)", options);
  });
}

// Filters and sections.
function createSelect(label, key, values, hasAll) {
  const onchange = (event) => {
    view[key] = event.target.value;
    draw(`select[data-filter="${key}"]`);
  };
  const options = values.map((value) => createElement("option", { value, selected: view[key] === value }, value));
  if (hasAll) options.unshift(createElement("option", { value: "" }, "all"));
  const select = createElement("select", { "data-filter": key, onchange }, ...options);
  return createElement("label", {}, label + " ", select);
}
function methodCheckbox(method, i) {
  const onchange = (event) => {
    if (event.target.checked) view.hidden.delete(method);
    else view.hidden.add(method);
    draw(`input[data-method="${i}"]`);
  };
  const attributes = { type: "checkbox", "data-method": i, checked: !view.hidden.has(method), onchange };
  return createElement("label", {}, createElement("input", attributes), " " + method);
}
function filters() {
  const title = `methods (${METHODS.length - view.hidden.size} of ${METHODS.length})`;
  const checkboxes = METHODS.map(methodCheckbox);
  return createElement("div", { class: "filters", role: "search", "aria-label": "Filters" },
    createSelect("stream", "stream", unique(RUNS.map((run) => run.stream)), true),
    createSelect("scenario", "scenario", unique(RUNS.map((run) => run.scenario)), true),
    createElement("details", {}, createElement("summary", {}, title),
      createElement("fieldset", {}, createElement("legend", {}, "show"), ...checkboxes)));
}
// A section with a title, or null without content.
function section(title, note, ...content) {
  const parts = content.flat().filter(Boolean);
  if (!parts.length) return null;
  return createElement("section", {},
    createElement("h2", {}, title), createElement("p", { class: "note" }, note), ...parts);
}
function grid(figures, label = null) {
  const drawn = figures.filter(Boolean);
  return drawn.length ? createElement("div", { class: "grid", "aria-label": label }, ...drawn) : null;
}
// A chart for each stream and scenario.
function chartPerSetting(runs, drawChart, label) {
  const figures = [...groupBy(runs, setting)].map(([title, group]) => {
    const chart = drawChart(group);
    return chart && createElement("figure", {}, createElement("figcaption", {}, title), chart);
  });
  return grid(figures, label);
}
// A chart for each method in each stream and scenario.
function chartPerMethod(runs, drawChart) {
  return [...groupBy(runs, setting)].flatMap(([title, group]) => {
    const byMethod = [...groupBy(group, (run) => run.method)];
    const figures = grid(byMethod.map(([method, seeds]) => drawChart(method, seeds)));
    return figures ? [createElement("h3", {}, title), figures] : [];
  });
}
function runDetails(run) {
  const content = JSON.stringify({ config: run.config, provenance: run.provenance }, null, 1);
  return createElement("details", {},
    createElement("summary", {}, describe(run)), createElement("pre", { tabindex: 0 }, content));
}
function draw(focusedSelector) {
  const isListOpen = document.querySelector(".filters details")?.open, runs = visibleRuns();
  const styles = unique(runs.map((run) => run.method)).map((method) => [method, STYLE[method]]);
  const sections = [
    section("Summary",
      "Mean ± standard deviation over seeds, accuracies in %. Average: mean over tasks. Overall: over all test "
      + "examples. The best value of each stream and scenario is highlighted.",
      runs.length ? summaryTable(runs) : createElement("p", {}, "No run matches the filters.")),
    section("Stability and plasticity",
      "Accuracy on old tasks against accuracy on new tasks, one point per run. Up and to the right is better. "
      + "The dashed line is the Pareto front.",
      chartPerSetting(runs, tradeOffChart, "Stability and plasticity"), styles.length ? createLegend(styles) : null),
    section("Cost",
      "Accuracy against cost, one point per run. Up and to the left is better.",
      createSelect("cost", "cost", COSTS), chartPerSetting(runs, costChart, "Cost")),
    section("Average over the stream",
      "Average accuracy over the tasks learned so far, mean over seeds.",
      chartPerSetting(runs, averageChart, "Average over the stream")),
    section("Accuracy matrices",
      "Rows: after learning a task. Columns: tested on a task. Mean over seeds, in %.",
      chartPerMethod(runs, accuracyMatrix)),
    section("Accuracy per task",
      "Accuracy on each task while later tasks are learned.",
      chartPerMethod(runs, taskChart)),
    section("Capacity and growth",
      "Diagnostics of the methods after each task.",
      grid(diagnosticCharts(runs))),
    section("Importances",
      "Distribution of the importances of parameters after each task, as quantiles.",
      grid(importanceCharts(runs))),
    section("Runs",
      "Configuration and provenance of each run, to repeat it.",
      runs.map(runDetails)),
  ];
  document.getElementById("page").replaceChildren(filters(), ...sections.filter(Boolean));
  saveView();
  if (isListOpen) document.querySelector(".filters details").open = true;
  if (focusedSelector) document.querySelector(focusedSelector)?.focus();
}

function plural(count, noun) { return `${count} ${noun}${count === 1 ? "" : "s"}`; }
const created = DATA.created.replace("T", " ").slice(0, 16);
document.getElementById("about").textContent =
  `${plural(RUNS.length, "run")} of ${plural(METHODS.length, "method")}. `
  + `Created ${created} UTC by Everlearn ${DATA.version || ""}.`;
draw();
