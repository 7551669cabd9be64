// What went wrong and what was slow, with why; quarantine; who did what.

import { ask, badge, call, find, instant, make, table, whole } from "./frame.js";
import { requestItem } from "./phases.js";

const EVERY_MS = 5000, ENTRIES = 100;

function every(load) {
  const timer = setInterval(() => document.hidden || load(), EVERY_MS);
  return () => clearInterval(timer);
}

const heading = (text, ...more) => make("div", { class: "above" }, make("h2", {}, text), more);

export async function requests(view) {
  const failed = make("ul", { class: "slow" }), slowest = make("ul", { class: "slow" }), found = make("ul", { class: "slow" });
  const id = make("input", { autocomplete: "off", spellcheck: "false", placeholder: "any id of it", "aria-label": "Request" });
  const order = make("select", { "aria-label": "Order" }, make("option", { value: "total" }, "whole time"), make("option", { value: "first_token" }, "first token"));
  const wrong = make("p", { class: "error", role: "alert" });
  const form = make("form", {}, id, " ", make("button", { class: "plain" }, "Explain"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    wrong.textContent = "";
    found.replaceChildren();
    if (!id.value.trim()) return;
    try {
      const { text, times } = await call(`/admin/v1/usage/requests/${encodeURIComponent(id.value.trim())}`);
      if (times) found.append(requestItem(times, { tenant: true }));
      found.append(make("li", {}, text.map((line) => make("p", { dir: "auto" }, line))));
    } catch (error) { wrong.textContent = error.message; }
  });
  const fill = (list, rows, empty) => list.replaceChildren(...(rows.length ? rows.slice(0, 20).map((times) => requestItem(times, { tenant: true })) : [make("li", { class: "empty" }, empty)]));
  const load = async () => {
    const [bad, slow] = await Promise.all([call("/admin/v1/usage/slowest?order=failed&limit=10"), call(`/admin/v1/usage/slowest?limit=5&order=${order.value}`)]);
    fill(failed, bad.data, "Nothing failed in the last hour.");
    fill(slowest, slow.data, "No request in the last hour.");
    if (view.isConnected) document.body.dataset.drawn = "requests";
  };
  order.addEventListener("change", load);
  view.replaceChildren(
    make("section", { class: "card" }, heading("Explain a request", form), wrong, found),
    make("section", { class: "card" }, heading("Failures of the last hour"), failed),
    make("section", { class: "card" }, heading("The slowest of the last hour, by tenant and model", order), slowest));
  await load();
  return every(() => load().catch((error) => { find("notice").textContent = error.message; }));
}

export async function quarantine(view) {
  const load = async () => {
    const rows = (await call("/admin/v1/quarantine")).data.reverse();
    const drop = (row) => async () => {
      await ask({ title: `Forget ${row.request_id}?`, text: "It leaves the quarantine; the ledger keeps its attempts.", verb: "Forget it", danger: true,
        act: () => call(`/admin/v1/quarantine/${encodeURIComponent(row.request_id)}`, { method: "DELETE" }) }) && load();
    };
    view.replaceChildren(make("section", { class: "card" }, heading(`Requests that ended engines ${whole(rows.length)}`), table([
      { title: "Request", kind: "name mono", show: (row) => row.request_id },
      { title: "Since", kind: "name", show: (row) => instant(row.quarantined_at_ms) },
      { title: "Tenant", kind: "name", show: (row) => make("span", { dir: "auto" }, row.tenant) },
      { title: "Model", kind: "name", show: (row) => make("span", { dir: "auto" }, row.model) },
      { title: "Why", kind: "long", show: (row) => row.reason },
      { title: "", kind: "actions", show: (row) => make("button", { type: "button", class: "plain small danger", onclick: drop(row) }, "Forget") },
    ], rows, { empty: "The quarantine is empty." })));
    if (view.isConnected) document.body.dataset.drawn = "quarantine";
  };
  await load();
}

const DULL = ["created_at_ms", "pepper"];
const RESULTS = { done: "good", refused: "warn", failed: "bad", intended: "warn" };

function changes(entry) {
  const value = (of) => of === undefined ? "–" : typeof of === "string" ? of : JSON.stringify(of);
  const names = [...new Set([...Object.keys(entry.before), ...Object.keys(entry.after)])].filter((name) => !DULL.includes(name) && entry.after[name] !== entry.target);
  const texts = names.map((name) => name in entry.before ? `${name} ${value(entry.before[name])} → ${value(entry.after[name])}` : `${name} ${value(entry.after[name])}`);
  const text = [entry.reason, ...texts].filter(Boolean).join(", ");
  return make("span", { title: text.slice(0, 1000) }, text);
}

export async function audit(view) {
  const area = make("select", { "aria-label": "Area" }, ["", "tenants", "keys", "logins", "models", "aliases", "rollouts", "workers", "requests", "quarantine", "prices"].map((each) => make("option", { value: each }, each || "all areas")));
  const target = make("input", { placeholder: "tenant, key, model", "aria-label": "Target", autocomplete: "off", spellcheck: "false" });
  const list = make("div");
  const load = async () => {
    const rows = (await call(`/admin/v1/audit?${new URLSearchParams({ limit: ENTRIES, action: area.value, target: target.value.trim() })}`)).data;
    list.replaceChildren(table([
      { title: "When", kind: "name", show: (row) => instant(row.at_ms) },
      { title: "Who", kind: "name mono", show: (row) => row.actor || "–" },
      { title: "From", kind: "name wide", show: (row) => `${row.address || "–"} (${row.via})` },
      { title: "What", kind: "name", show: (row) => row.action },
      { title: "To", kind: "name", show: (row) => make("span", { dir: "auto", title: row.target }, row.target || "–") },
      { title: "Result", kind: "name", show: (row) => [badge(row.count > 1 ? `${row.result}, ${row.count} times` : row.result, RESULTS[row.result], row.reason)] },
      { title: "Before → after", kind: "long", show: changes },
    ], rows, { empty: "Nothing was done in the areas that this key may see." }));
    if (view.isConnected) document.body.dataset.drawn = "audit";
  };
  const again = () => load().catch((error) => { find("notice").textContent = error.message; });
  area.addEventListener("change", again);
  target.addEventListener("change", again);
  view.replaceChildren(make("section", { class: "card" }, heading("Who did what, newest first", area, target), list));
  await load();
  return every(() => document.activeElement === target || again());
}
