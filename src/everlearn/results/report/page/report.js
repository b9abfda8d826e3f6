// The page: data in, sections out; every name of the user's goes through textContent.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const METHODS = [...new Set(RUNS.map((r) => r.method))];
const KIND = Object.fromEntries(METHODS.map((m, i) => [m, i]));
const wish = { stream: "", scenario: "", hidden: new Set(), sort: "average", down: true, cost: "seconds" };
// A page that loads itself again goes on with what was chosen; where there is nothing to keep it in, it starts anew.
try { const kept = JSON.parse(sessionStorage.getItem("everlearn") || "{}"); Object.assign(wish, kept, { hidden: new Set(kept.hidden || []) }); } catch { wish.hidden = new Set(); }
const COLUMNS = [
  ["method", "method"], ["scenario", "scenario"],
  ["average", "average", 1], ["overall", "overall", 1], ["forgetting", "forgetting", -1], ["learning", "learning", 1], ["backward transfer", "backward", 1],
  ["seconds", "seconds", -1], ["state bytes", "state KB", -1], ["parameters", "parameters", -1], ["seeds", "seeds"], ["stream", "stream"],
];

function unique(values) { return [...new Set(values)]; }
function known(values) { return values.filter((v) => v !== null && v !== undefined); }
function mean(values) { return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; }
function deviation(values) {
  const m = mean(values);
  return values.length > 1 ? Math.sqrt(values.reduce((a, v) => a + (v - m) ** 2, 0) / (values.length - 1)) : null;
}
function isShare(run) { return run.score === "accuracy"; }
function shown() {
  return RUNS.filter((r) => (!wish.stream || r.stream === wish.stream) && (!wish.scenario || r.scenario === wish.scenario) && !wish.hidden.has(r.method));
}
function grouped(runs, key) {
  const groups = new Map();
  for (const r of runs) { const k = key(r); if (!groups.has(k)) groups.set(k, []); groups.get(k).push(r); }
  return groups;
}
function place(r) { return `${r.stream}, ${r.scenario}-incremental`; }
function amount(run, v) { return v === null ? "–" : isShare(run) ? (100 * v).toFixed(1) : String(+v.toPrecision(4)); }
function described(run) { return `${run.method}, ${place(run)}, seed ${run.seed}`; }

// The summary.
function entry(runs, column) {
  const r = runs[0];
  if (column === "seeds") return { value: runs.length, text: String(runs.length) };
  if (["method", "stream", "scenario"].includes(column)) return { value: r[column], text: r[column] };
  const values = known(runs.map((run) => run[column])), m = mean(values), d = deviation(values);
  if (m === null) return { value: null, text: "–" };
  if (column === "seconds") return { value: m, text: m.toFixed(1) };
  if (column === "state bytes") return { value: m, text: Math.round(m / 1024).toLocaleString("en") };
  if (column === "parameters") return { value: m, text: Math.round(m).toLocaleString("en") };
  return { value: m, text: amount(r, m) + (d === null ? "" : ` ± ${amount(r, d)}`) };
}
function summary(runs) {
  const rows = [...grouped(runs, (r) => JSON.stringify([r.stream, r.scenario, r.method])).values()];
  const best = new Map();
  for (const [column, , sign] of COLUMNS.filter((c) => c[2]))
    for (const [where, those] of grouped(rows.map((rs) => ({ rs, at: place(rs[0]) })), (o) => o.at)) {
      const values = known(those.map((o) => entry(o.rs, column).value));
      if (those.length > 1 && new Set(values).size > 1) best.set(column + "\n" + where, sign > 0 ? Math.max(...values) : Math.min(...values));
    }
  const key = (rs) => entry(rs, wish.sort).value;
  rows.sort((a, b) => {
    const u = key(a), v = key(b);
    if (u === null || v === null) return (u === null) - (v === null);
    return (u < v ? -1 : u > v ? 1 : 0) * (wish.down ? -1 : 1);
  });
  const head = COLUMNS.map(([column, title]) => make("th", { scope: "col", class: ["method", "stream", "scenario"].includes(column) ? "name" : "", "aria-sort": wish.sort === column ? (wish.down ? "descending" : "ascending") : "none" },
    make("button", { type: "button", "data-sort": column, onclick: () => { wish.down = wish.sort === column ? !wish.down : !["method", "stream", "scenario"].includes(column); wish.sort = column; draw(`button[data-sort="${column}"]`); } }, title)));
  const body = rows.map((rs) => make("tr", {}, ...COLUMNS.map(([column]) => {
    const e = entry(rs, column);
    if (column === "method") return make("th", { scope: "row" }, e.text);
    const isBest = e.value !== null && best.get(column + "\n" + place(rs[0])) === e.value;
    return make("td", { class: (["stream", "scenario"].includes(column) ? "name" : "") + (isBest ? " best" : ""), title: isBest ? "best here" : null }, e.text);
  })));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Summary table" }, make("table", { class: "summary" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

// Pictures.
function plane(runs) {
  const points = runs.filter((r) => r["old tasks"] !== null && r.learning !== null).map((r) => ({ x: r.learning * (isShare(r) ? 100 : 1), y: r["old tasks"] * (isShare(r) ? 100 : 1), kind: KIND[r.method], text: `${described(r)}: new tasks ${amount(r, r.learning)}, old tasks ${amount(r, r["old tasks"])}` }));
  return points.length ? scatter(points, ["accuracy on new tasks (plasticity)", "accuracy on old tasks (stability)"], { front: 1, label: "Stability against plasticity, one point per run, the Pareto front dashed" }) : null;
}
function costs(runs) {
  const points = runs.filter((r) => r.average !== null && r[wish.cost]).map((r) => ({ x: r[wish.cost], y: r.average * (isShare(r) ? 100 : 1), kind: KIND[r.method], text: `${described(r)}: ${amount(r, r.average)} with ${short(r[wish.cost])} ${wish.cost}` }));
  return points.length ? scatter(points, [wish.cost + " (logarithmic)", "average accuracy"], { front: -1, log: true, label: `Accuracy against ${wish.cost}, one point per run, the Pareto front dashed` }) : null;
}
function averaged(runs, pick) {
  const tables = runs.map(pick).filter((t) => t.length), rows = Math.min(...tables.map((t) => t.length));
  return Array.from({ length: Number.isFinite(rows) ? rows : 0 }, (_, i) => tables[0][i].map((_, j) => mean(known(tables.map((t) => t[i][j])))));
}
function course(runs) {
  const series = [...grouped(runs, (r) => r.method)].map(([method, rs]) => {
    const matrix = averaged(rs, (r) => r.matrix), factor = isShare(rs[0]) ? 100 : 1;
    return { name: method, kind: KIND[method], points: matrix.length < 2 ? [] : matrix.map((row, i) => [rs[0].tasks[i], factor * mean(known(row.slice(0, i + 1)))]) };
  }).filter((s) => s.points.length > 1);
  return series.length ? lines(series, ["tasks learned", "average over tasks so far"], { label: "Average accuracy over the tasks learned so far, by method" }) : null;
}
function tasksOf(method, rs) {
  const matrix = averaged(rs, (r) => r.matrix), factor = isShare(rs[0]) ? 100 : 1;
  if (matrix.length < 2) return null;
  const series = matrix[0].map((_, j) => ({ name: `task ${rs[0].tasks[j]}`, kind: j, points: matrix.map((row, i) => [rs[0].tasks[i], row[j] === null ? null : factor * row[j]]).filter((p, i) => i >= j && p[1] !== null) })).filter((s) => s.points.length);
  return make("figure", {}, make("figcaption", {}, method), lines(series, ["tasks learned", "accuracy on each task"], { label: `${method}: accuracy on each task while later ones are learned` }));
}
function heat(method, rs) {
  const matrix = averaged(rs, (r) => r.matrix), numbers = matrix.length && matrix[0].length <= 12, top = isShare(rs[0]) ? 1 : Math.max(...known(matrix.flat())), low = isShare(rs[0]) ? 0 : Math.min(...known(matrix.flat()));
  const cell = (v, i, j) => {
    const share = v === null ? 0 : Math.max(0, Math.min(1, (v - low) / (top - low || 1)));
    const text = v === null ? "–" : isShare(rs[0]) ? String(Math.round(100 * v)) : String(+v.toPrecision(2));
    return make("td", { style: `background: hsl(212 ${Math.round(30 + 40 * share)}% ${Math.round(96 - 66 * share)}%); color: ${share > 0.72 ? "#fff" : "#000"}`, title: `task ${rs[0].tasks[j]} after task ${matrix.length > 1 ? rs[0].tasks[i] : "all"}: ${amount(rs[0], v)}` }, numbers ? text : "");
  };
  const head = make("tr", {}, make("td", { "aria-label": "after learning" }), ...matrix[0].map((_, j) => make("th", { scope: "col" }, numbers ? `${rs[0].tasks[j]}` : "")));
  return make("table", { class: "heat" }, make("caption", {}, method), head, ...matrix.map((row, i) => make("tr", {}, make("th", { scope: "row" }, matrix.length > 1 ? (numbers ? `${rs[0].tasks[i]}` : "") : "all"), ...row.map((v, j) => cell(v, i, j)))));
}
function facts(runs, wanted) {
  const names = unique(runs.flatMap((r) => r.facts.flatMap((f) => Object.keys(f)))).filter(wanted);
  return names.map((name) => {
    const series = [...grouped(runs, (r) => r.method)].map(([method, rs]) => {
      const told = rs.filter((r) => r.facts.some((f) => name in f));
      return { name: method, kind: KIND[method], points: told.length ? told[0].facts.map((_, i) => [told[0].tasks[i], mean(known(told.map((r) => r.facts[i] && r.facts[i][name])))]).filter((p) => p[1] !== null) : [] };
    }).filter((s) => s.points.length);
    return series.length ? make("figure", {}, make("figcaption", {}, name), lines(series, ["tasks learned", name], { label: `${name} over the stream, by method` }), legend(series.map((s) => [s.name, s.kind]))) : null;
  });
}
function importances(runs) {
  const told = runs.filter((r) => r.facts.some((f) => Object.keys(f).some((n) => n.startsWith("importance"))));
  return [...grouped(told, (r) => `${r.method}, ${place(r)}`)].map(([title, rs]) => {
    const names = unique(rs[0].facts.flatMap((f) => Object.keys(f))).filter((n) => n.startsWith("importance"));
    const series = names.map((name, i) => ({ name: name.replace("importance ", ""), kind: i, points: rs[0].facts.map((f, t) => [rs[0].tasks[t], f[name]]).filter((p) => p[1] > 0) })).filter((s) => s.points.length);
    return series.length ? make("figure", {}, make("figcaption", {}, title), lines(series, ["tasks learned", "importance (logarithmic)"], { log: true, label: `Quantiles of the importances of ${title}` }), legend(series.map((s) => [s.name, s.kind]))) : null;
  });
}

// Filters and sections.
function choice(name, values) {
  return make("label", {}, name + " ", make("select", { "data-filter": name, onchange: (event) => { wish[name] = event.target.value; draw(`select[data-filter="${name}"]`); } },
    make("option", { value: "" }, "all"), ...values.map((v) => make("option", { value: v, selected: wish[name] === v }, v))));
}
function filters() {
  const boxes = METHODS.map((m, i) => make("label", {}, make("input", { type: "checkbox", "data-method": i, checked: !wish.hidden.has(m), onchange: (event) => { wish.hidden[event.target.checked ? "delete" : "add"](m); draw(`input[data-method="${i}"]`); } }), " " + m));
  return make("div", { class: "filters", role: "search", "aria-label": "Filters" }, choice("stream", unique(RUNS.map((r) => r.stream))), choice("scenario", unique(RUNS.map((r) => r.scenario))),
    make("details", {}, make("summary", {}, `methods (${METHODS.length - wish.hidden.size} of ${METHODS.length})`), make("fieldset", {}, make("legend", {}, "show"), ...boxes)));
}
function section(title, note, ...inside) {
  const parts = inside.flat().filter(Boolean);
  return parts.length ? make("section", {}, make("h2", {}, title), note ? make("p", { class: "note" }, note) : null, ...parts) : null;
}
function everywhere(runs, drawn) {
  return [...grouped(runs, place)].flatMap(([where, rs]) => {
    const figures = [...grouped(rs, (r) => r.method)].map(([method, own]) => drawn(method, own)).filter(Boolean);
    return figures.length ? [make("h3", {}, where), make("div", { class: "grid" }, ...figures)] : [];
  });
}
function pictured(runs, drawn, title) {
  const figures = [...grouped(runs, place)].map(([where, rs]) => [where, drawn(rs)]).filter(([, svg]) => svg).map(([where, svg]) => make("figure", {}, make("figcaption", {}, where), svg));
  return figures.length ? make("div", { class: "grid", "aria-label": title }, ...figures) : null;
}
function costChoice() {
  return make("label", {}, "cost ", make("select", { "data-filter": "cost", onchange: (event) => { wish.cost = event.target.value; draw('select[data-filter="cost"]'); } },
    ...["seconds", "state bytes", "peak bytes", "parameters"].map((v) => make("option", { value: v, selected: wish.cost === v }, v))));
}
function configuration(runs) {
  return runs.map((r) => make("details", {}, make("summary", {}, described(r)), make("pre", { tabindex: 0 }, JSON.stringify({ config: r.config, made: r.made }, null, 1))));
}
function draw(focus) {
  const open = document.querySelector(".filters details")?.open, runs = shown();
  const kinds = unique(runs.map((r) => r.method)).map((m) => [m, KIND[m]]);
  document.getElementById("page").replaceChildren(...[
    filters(),
    section("Summary", "Mean ± standard deviation over seeds, accuracies in %. Average: mean over tasks; overall: over all test examples. The best of each stream and scenario is marked.", runs.length ? summary(runs) : make("p", {}, "Nothing is left: choose other filters.")),
    section("Stability and plasticity", "What is kept of old tasks against how well new ones are learned, one point per run. Up and right is better; the dashed line joins runs that none beats in both.", pictured(runs, plane, "Stability and plasticity"), kinds.length ? legend(kinds) : null),
    section("Cost", "Accuracy against what it costs, one point per run. Up and left is better.", costChoice(), pictured(runs, costs, "Cost")),
    section("Over the stream", "The average over the tasks learned so far, mean over seeds.", pictured(runs, course, "Over the stream")),
    section("Accuracy matrices", "Rows: after learning a task. Columns: tested on a task. Mean over seeds, in %.", everywhere(runs, heat)),
    section("Task by task", "How the accuracy on each task goes on while later ones are learned.", everywhere(runs, tasksOf)),
    section("Capacity and growth", "What methods tell of themselves after each task.", make("div", { class: "grid" }, ...facts(runs, (n) => !n.startsWith("importance")).filter(Boolean))),
    section("Importances", "How the importances of parameters are distributed: quantiles, after each task.", make("div", { class: "grid" }, ...importances(runs).filter(Boolean))),
    section("Runs", "Configuration and versions, to do each again.", configuration(runs)),
  ].filter((part) => part && (part.tagName !== "SECTION" || part.lastChild.childNodes.length)));
  try { sessionStorage.setItem("everlearn", JSON.stringify({ ...wish, hidden: [...wish.hidden] })); } catch { /* a browser that keeps nothing */ }
  if (open) document.querySelector(".filters details").open = true;
  if (focus) document.querySelector(focus)?.focus();
}
document.getElementById("about").textContent = `${RUNS.length} run${RUNS.length === 1 ? "" : "s"} of ${METHODS.length} method${METHODS.length === 1 ? "" : "s"}. Made ${DATA.made.replace("T", " ").slice(0, 16)} UTC by Everlearn ${DATA.version || ""}.`;
draw();
