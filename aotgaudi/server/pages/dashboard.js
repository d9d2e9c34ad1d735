// Shows what /dashboard/data says, every two seconds. Whatever comes from there goes into the page as text.
"use strict";

const PERIOD_MS = 2000, KEPT = 150, FIRST_ROWS = 25, WINDOW_SECONDS = 30;
const history = [];  // {at, data}, the oldest first
let showsAll = false;

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (part, whole) => (whole > 0 ? `${number((100 * part) / whole, 1)} %` : "–");
const per = (sum, count) => (count > 0 ? sum / count : null);

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${number(value * 1000, value < 0.1 ? 1 : 0)} ms` : `${number(value, 2)} s`;
}

function since(total) {
  const minutes = Math.floor(total / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.floor(total)} s`;
}

// What has happened in the last seconds: the newest data and those to compare with.
function recent() {
  const newest = history[history.length - 1];
  const base = history.find((one) => newest.at - one.at <= WINDOW_SECONDS) || newest;
  const span = newest.at - base.at;
  const grown = (pick) => pick(newest.data) - pick(base.data);
  return { grown, rate: (pick) => (span > 0 ? grown(pick) / span : 0) };
}

function tile(label, value, isBad = false) {
  return make("div", { class: isBad ? "tile bad" : "tile" }, make("b", {}, value), make("span", {}, label));
}

function drawTiles(data) {
  const { grown, rate } = recent();
  const all = (pick) => (d) => Object.values(d.kinds).reduce((sum, kind) => sum + pick(kind), 0);
  const padded = grown(all((k) => k.padding_tokens)), needed = grown(all((k) => k.tokens));
  const compiled = Object.values(data.coverage.compilations).reduce((sum, one) => sum + one, 0);
  const blocks = data.kv.used + data.kv.free;
  $("tiles").replaceChildren(
    tile("tokens generated a second", number(rate((d) => d.tokens.generated), 1)),
    tile("prompt tokens a second", number(rate((d) => d.tokens.prompt), 1)),
    tile("requests running", number(data.requests.running)),
    tile("requests waiting", number(data.requests.waiting)),
    tile("first token, mean", seconds(per(grown(all((k) => k.first_token_seconds)), grown(all((k) => k.first_tokens))))),
    tile("between tokens, mean", seconds(per(grown(all((k) => k.gap_seconds)), grown(all((k) => k.gaps))))),
    tile("padding of tokens computed", percent(padded, padded + needed)),
    tile("KV blocks in use", percent(data.kv.used, blocks)),
    tile("compilations on live traffic", number(compiled), compiled > 0),
  );
}

function chart(place, series) {
  const width = 300, height = 100, top = Math.max(1, ...series.flatMap((one) => one.values));
  const x = (index) => width - ((series[0].values.length - 1 - index) * width) / (KEPT - 1);
  const y = (value) => height - 4 - (value / top) * (height - 10);
  const lines = series.map((one) =>
    svg("polyline", { class: one.class, points: one.values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ") }));
  const base = svg("line", { x1: 0, x2: width, y1: height - 4, y2: height - 4 });
  const text = series.map((one) => `${one.name}: ${number(one.values[one.values.length - 1] || 0, one.digits)}`).join(", ");
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${text}; at most ${number(top, 0)}`,
  }, base, ...lines);
  const legend = make("div", { class: "legend" }, ...series.map((one) =>
    make("span", {}, make("i", { class: one.class.replace("s", "b") }), `${one.name} ${number(one.values[one.values.length - 1] || 0, one.digits)}`)),
    make("span", {}, `top ${number(top, 0)}, last ${since((history.length - 1) * PERIOD_MS / 1000)}`));
  place.replaceChildren(picture, legend);
}

function rates(pick) {
  const values = history.map((one, index) => {
    const before = history[Math.max(0, index - 1)];
    const span = one.at - before.at;
    return span > 0 ? Math.max(0, (pick(one.data) - pick(before.data)) / span) : 0;
  });
  if (values.length > 1) values[0] = values[1];  // Nothing came before the first.
  return values;
}

function drawCharts() {
  chart($("tokens-chart"), [
    { name: "generated", class: "s1", digits: 1, values: rates((d) => d.tokens.generated) },
    { name: "prompts", class: "s2", digits: 1, values: rates((d) => d.tokens.prompt) },
  ]);
  chart($("requests-chart"), [
    { name: "running", class: "s1", digits: 0, values: history.map((one) => one.data.requests.running) },
    { name: "waiting", class: "s2", digits: 0, values: history.map((one) => one.data.requests.waiting) },
  ]);
}

function bar(parts) {
  const total = parts.reduce((sum, [value]) => sum + value, 0);
  return make("div", { class: "bar" }, ...parts.map(([value, className]) =>
    make("i", { class: className, style: { width: `${total > 0 ? (100 * value) / total : 0}%` } })));
}

function list(rows) {
  return make("dl", {}, ...rows.flatMap(([name, value, isBad]) =>
    [make("dt", {}, name), make("dd", isBad ? { class: "bad-text" } : {}, value)]));
}

function drawBlocks(data) {
  const { kv, prefix, defrag, requests, kinds } = data;
  const legend = make("div", { class: "legend" }, ...[["in use", "b1", kv.used], ["cached prefixes", "b3", kv.cached], ["free", "b0", kv.free - kv.cached]]
    .map(([name, className, value]) => make("span", {}, make("i", { class: className }), `${name} ${number(value)}`)));
  const moves = kinds.defrag || { steps: 0, seconds: 0 };
  $("kv").replaceChildren(
    bar([[kv.used, "b1"], [kv.cached, "b3"], [kv.free - kv.cached, "b0"]]), legend,
    list([
      ["highest block in use", `${number(kv.highest)} for ${number(kv.used)} in use`],
      ["defragmentation", `${number(defrag.swaps)} blocks moved in ${number(moves.steps)} steps, ${seconds(moves.seconds)}`],
      ["preemptions", number(requests.preemptions), requests.preemptions > 0],
      ["prefix cache", `${percent(prefix.hits, prefix.queries)} of ${number(prefix.queries)} prompt tokens found; ${number(kv.evicted)} blocks given up`],
    ]));
}

function drawCoverage(data) {
  const { coverage, readiness } = data;
  const live = Object.entries(coverage.compilations).filter(([, count]) => count > 0);
  const used = Object.entries(coverage.used_by_kind).map(([kind, count]) => `${number(count)} ${kind}`).join(", ");
  $("coverage").replaceChildren(
    bar([[coverage.used, "b1"], [Math.max(0, coverage.warm - coverage.used), "b3"], [coverage.entries - coverage.warm, "b2"]]),
    make("div", { class: "legend" }, ...[["used so far", "b1", coverage.used], ["warm", "b3", coverage.warm], ["cold", "b2", coverage.entries - coverage.warm]]
      .map(([name, className, value]) => make("span", {}, make("i", { class: className }), `${name} ${number(value)}`))),
    list([
      ["proof", coverage.said || "–"],
      ["used", used],
      ["guard", coverage.guard.join(" + ") || "none", coverage.guard.length === 0],
      ["compiled or tried", live.map(([cause, count]) => `${cause} ${number(count)}`).join(", ") || "never", live.length > 0],
      ["manifest", data.server.manifest_id.slice(0, 16)],
      ["model", readiness.model],
    ]));
}

function drawEntries(data) {
  const rows = [...data.entries].sort((a, b) => b.seconds - a.seconds);
  const total = rows.reduce((sum, row) => sum + row.seconds, 0);
  const shown = showsAll ? rows : rows.slice(0, FIRST_ROWS);
  const heads = ["kind", "bucket", "steps", "mean", "share of time", "tokens needed", "padding of tokens", "padding of blocks"];
  $("entries").tHead.replaceChildren(make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head))));
  $("entries").tBodies[0].replaceChildren(...shown.map((row) => make("tr", {},
    make("td", {}, row.kind), make("td", {}, row.bucket), make("td", {}, number(row.steps)),
    make("td", {}, seconds(per(row.seconds, row.steps))),
    make("td", {}, percent(row.seconds, total), bar([[row.seconds, "b1"], [total - row.seconds, "b0"]])),
    make("td", {}, number(row.tokens)),
    make("td", {}, percent(row.padding_tokens, row.tokens + row.padding_tokens), bar([[row.padding_tokens, "b2"], [row.tokens, "b0"]])),
    make("td", {}, percent(row.padding_blocks, row.blocks + row.padding_blocks), bar([[row.padding_blocks, "b2"], [row.blocks, "b0"]])))));
  $("entries-caption").textContent = rows.length
    ? `${number(shown.length)} of ${number(rows.length)}, by the time that they took since the start`
    : "No step has run yet.";
  $("more").hidden = rows.length <= FIRST_ROWS;
  $("more").textContent = showsAll ? "Show fewer" : "Show all";
}

function drawEnds(data) {
  const { finished, refused, failed_steps: failed, oldest_waiting_seconds: oldest } = data.requests;
  const rows = (counts) => Object.entries(counts).map(([reason, count]) => `${reason} ${number(count)}`).join(", ") || "none";
  $("ended").replaceChildren(list([
    ["ended", rows(finished)],
    ["refused for want of room", rows(Object.fromEntries(Object.entries(refused).filter(([, count]) => count > 0)))],
    ["failed steps", number(failed), failed > 0],
    ["waiting longest", oldest > 0 ? seconds(oldest) : "nobody waits"],
  ]));
}

function drawStart(data) {
  const { phases, seconds: total } = data.start;
  $("start").replaceChildren(
    make("p", { class: "quiet", style: { marginTop: "0" } }, `ready ${seconds(total)} after the process began`),
    make("div", { class: "gantt" }, ...phases.flatMap((phase) => [
      make("span", { class: "quiet" }, phase.phase),
      make("div", { class: "lane" }, make("i", { style: {
        left: `${(100 * phase.begin) / total}%`, width: `${(100 * (phase.end - phase.begin)) / total}%` } })),
      make("span", {}, seconds(phase.end - phase.begin))])));
}

function drawHead(data) {
  const { server, readiness } = data;
  document.title = `${server.model} · aotgaudi`;
  $("model").textContent = server.model;
  $("state").textContent = readiness.ready ? "ready" : readiness.reason;
  $("state").className = readiness.ready ? "pill good" : "pill bad";
  $("about").textContent = `aotgaudi ${server.version} · up ${since(server.now - server.started_at)} · prompts and outputs to ${number(server.max_model_len)} tokens`;
}

function draw(data) {
  for (const part of [drawHead, drawTiles, drawCharts, drawBlocks, drawCoverage, drawEntries, drawEnds, drawStart]) part(data);
}

async function poll() {
  try {
    const answer = await fetch("dashboard/data", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const data = await answer.json();
    const last = history[history.length - 1];
    if (last && data.server.started_at !== last.data.server.started_at) history.length = 0;  // Another server.
    history.push({ at: data.server.now, data });
    if (history.length > KEPT) history.shift();
    draw(data);
    document.body.dataset.drawn = String(history.length);
  } catch (error) {
    $("state").textContent = "no answer";
    $("state").className = "pill bad";
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, PERIOD_MS));
  }
}

$("more").addEventListener("click", () => {
  showsAll = !showsAll;
  if (history.length) drawEntries(history[history.length - 1].data);
});
run();
