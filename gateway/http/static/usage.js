// What was used, what it cost, how long it took: of a key's tenant, or at the admin address of all.

import { bars, quantiles } from "./charts.js";
import { DASH, call, find, key, make, onKey, short, span, whole } from "./frame.js";
import { requestItem } from "./phases.js";

const monthField = find("month"), notice = find("notice");
const PAGES_MAX = 10, ROWS_MAX = 1000;
const OUTCOMES = { completed: 2, cancelled: 1, failed: 4, lost: 3, expired: 7 };
const FIGURES = ["amount", "requests", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens",
  "reasoning_tokens", "unbilled_tokens", "unpriced_tokens"];
const ofAll = location.pathname.startsWith("/admin");
const scope = ofAll ? "/admin/v1" : "/v1";
let found = null, table = { rows: [], currency: "" }, asked = 0;

const given = new URLSearchParams(location.search).get("month") || "";
monthField.value = /^\d{4}-\d{2}$/.test(given) ? given : new Date().toISOString().slice(0, 7);
if (ofAll) find("by").append(new Option("tenant", "tenant"), new Option("tenant and model", "tenant,model"));

const moneyShort = (amount) => amount && amount < 1 ? String(Number(amount.toPrecision(2))) : short(amount);
const tokens = (row) => row.prompt_tokens + row.completion_tokens;

// Amounts are exact decimal texts: sums are made of whole numbers, never of floats.
function addExact(texts) {
  const unit = 10n ** 12n;
  let sum = 0n;
  for (const text of texts) {
    const [head, tail = ""] = text.split(".");
    sum += BigInt(head) * unit + BigInt(tail.padEnd(12, "0"));
  }
  const rest = (sum % unit).toString().padStart(12, "0").replace(/0+$/, "").padEnd(2, "0");
  return `${(sum / unit).toString().replace(/\B(?=(\d{3})+$)/g, ",")}.${rest}`;
}

function range() {
  const [year, month] = monthField.value.split("-").map(Number);
  const next = month === 12 ? `${year + 1}-01` : `${year}-${String(month + 1).padStart(2, "0")}`;
  return { from: `${monthField.value}-01`, to: `${next}-01` };
}

function days() {
  const { from, to } = range();
  const list = [];
  for (let at = Date.parse(from); at < Date.parse(to); at += 86400000) list.push(new Date(at).toISOString().slice(0, 10));
  return list;
}

async function ask(path, by) {
  const rows = [];
  let after = "", answer = null;
  for (let page = 0; page < PAGES_MAX; page += 1) {
    answer = await call(`${scope}${path}?${new URLSearchParams({ by, ...range(), limit: "10000", ...(after ? { after } : {}) })}`);
    rows.push(...answer.data);
    if (!answer.has_more) break;
    after = answer.next;
  }
  return { rows, currency: answer.currency || "", more: answer.has_more };
}

async function load() {
  const mine = ++asked;
  notice.textContent = "";
  if (!key()) return;
  find("show").disabled = true;
  try {
    const [model, byKey, outcome, latency, total, slowest] = await Promise.all([
      ask("/usage", "day,model"), ask("/usage", "day,key"), ask("/usage", "day,outcome"), ask("/usage/latency", "day"),
      ask("/usage", find("by").value), call(`${scope}/usage/slowest?limit=3`)]);
    if (mine !== asked) return;
    found = { model, byKey, outcome, latency, slowest: slowest.data };
    table = total;
    find("empty").hidden = true;
    find("content").hidden = false;
    show();
    document.body.dataset.drawn = String(mine);
  } catch (error) {
    if (mine !== asked) return;
    notice.textContent = error.message;
    document.body.dataset.drawn = "failed";
  } finally {
    if (mine === asked) find("show").disabled = false;
  }
}

function show() {
  const { model, byKey, outcome, latency } = found, list = days();
  sums();
  const cost = { weight: tokens, value: (row) => Number(row.amount), show: moneyShort, empty: model.currency ? undefined : "no prices are set" };
  const size = { weight: tokens, value: tokens, show: short };
  bars(find("spend"), list, model.rows, { by: "model", label: "Cost by day and model", ...cost });
  bars(find("spend-key"), list, byKey.rows, { by: "key", label: "Cost by day and key", ...cost });
  bars(find("tokens"), list, model.rows, { by: "model", label: "Tokens by day and model", ...size });
  bars(find("tokens-key"), list, byKey.rows, { by: "key", label: "Tokens by day and key", ...size });
  bars(find("outcomes"), list, outcome.rows, { by: "outcome", label: "Requests by day and outcome", weight: tokens, value: (row) => row.requests, show: short, fixed: OUTCOMES });
  quantiles(find("latency"), list, latency.rows, find("span").value, span);
  const slow = found.slowest.slice(0, 10).map((times) => requestItem(times, { tenant: ofAll }));
  find("slowest").replaceChildren(...(slow.length ? slow : [make("li", { class: "empty" }, "No request in the last hour.")]));
  showTable();
}

function sums() {
  const rows = found.model.rows, currency = found.model.currency;
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  const unpriced = sum("unpriced_tokens"), prompt = sum("prompt_tokens");
  const items = [
    ["Cost", currency ? addExact(rows.map((row) => row.amount)) : DASH, currency || "no prices set"],
    ["Requests", whole(sum("requests")), ""],
    ["Prompt tokens", whole(prompt), ""],
    ["of which cached", whole(sum("cached_tokens")), prompt ? `${(100 * sum("cached_tokens") / prompt).toFixed(0)} %` : ""],
    ["Completion tokens", whole(sum("completion_tokens")), ""],
    ["Tokens not billed", whole(sum("unbilled_tokens")), ""],
    ...(unpriced && currency ? [["Tokens without a price", whole(unpriced), ""]] : []),
  ];
  find("sums").replaceChildren(...items.map(([name, text, small]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, text, small ? make("small", {}, ` ${small}`) : ""))));
}

function showTable() {
  const names = find("by").value.split(","), columns = [...names, ...FIGURES];
  const kind = (name) => names.includes(name) ? { class: "name" } : {};
  const title = (name) => name.replaceAll("_", " ") + (name === "amount" && table.currency ? ` (${table.currency})` : "");
  document.querySelector("thead").replaceChildren(make("tr", {}, columns.map((name) => make("th", { scope: "col", ...kind(name) }, title(name)))));
  const shown = table.rows.slice(0, ROWS_MAX);
  const cell = (row, name) => typeof row[name] === "number" ? whole(row[name]) : name === "amount" && !table.currency ? DASH : row[name] || (names.includes(name) ? "(none)" : "");
  document.querySelector("tbody").replaceChildren(...shown.map((row) => make("tr", {}, columns.map((name) => make("td", kind(name), cell(row, name))))));
  const hidden = table.rows.length - shown.length;
  find("more").textContent = table.more ? "There is more than can be shown or downloaded here: choose fewer groups." : hidden > 0 ? `${whole(hidden)} more lines are in the CSV file.` : "";
}

function download() {
  const columns = [...find("by").value.split(","), ...FIGURES, "currency"];
  // A text that starts like a formula must not become one in a spreadsheet.
  const quote = (value) => {
    const text = String(value ?? "");
    return `"${(typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const text = [columns, ...table.rows.map((row) => columns.map((name) => name === "currency" ? table.currency : row[name]))]
    .map((line) => line.map(quote).join(",")).join("\r\n");
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `usage-${monthField.value}.csv` });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function explain() {
  const id = find("request").value.trim();
  find("lookup-notice").textContent = "";
  find("found").replaceChildren();
  if (!id) return;
  try {
    const answer = await call(`${scope}/usage/requests/${encodeURIComponent(id)}`);
    const times = ofAll ? answer.times : answer;
    if (times) find("found").append(requestItem(times, { tenant: ofAll }));
    if (ofAll) find("found").append(...answer.text.map((line) => make("li", { dir: "auto" }, line)));
  } catch (error) {
    find("lookup-notice").textContent = error.message;
  }
}

onKey(load);
find("form").addEventListener("submit", (event) => { event.preventDefault(); load(); });
find("lookup").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
find("span").addEventListener("change", () => { if (found) show(); });
find("by").addEventListener("change", async () => {
  try { table = await ask("/usage", find("by").value); showTable(); } catch (error) { notice.textContent = error.message; }
});
find("csv").addEventListener("click", download);
load();
