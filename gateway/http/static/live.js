// Pools, workers and queues as they are now: a snapshot about once a second.

import { sparkline } from "./charts.js";
import { Problem, ask, badge, call, draw, find, make, meter, missing, perSecond, percent, readEvents, reconcile, request, setMeter, setText, short, span, table, whole } from "./frame.js";

const SECONDS = 120, AGAIN_MS = 2000, ROLLOUTS_MS = 5000, SILENT_MS = 5000, FEW = 8;
const OVER = ["promoted", "aborted", "stopped"];
const STATES = { ready: "good", held: "warn", starting: "warn", draining: "warn", engine_down: "bad", failed: "bad" };

export async function open(view, { tell, fail }) {
  const stop = new AbortController();
  const sums = summary(), models = make("div", { class: "models" });
  const past = [];
  let last = null, heard = 0;
  const rollouts = new Map();  // Of models whose roll-out goes on.
  const readRollouts = async () => {
    if (document.hidden) return;
    try {
      const open = (await call("/admin/v1/rollouts")).data.filter((each) => !OVER.includes(each.progress?.phase));
      rollouts.clear();
      for (const each of open) rollouts.set(each.plan.model, each);
    } catch { /* what was read before is shown on: the live view says what is wrong */ }
  };
  view.replaceChildren(sums.element, models);

  const take = (snapshot) => {
    if (stop.signal.aborted) return;
    heard = performance.now();
    last = snapshot;
    const rate = total(snapshot.models, (pool) => pool.output_tokens_per_s);
    past.push(rate);
    if (past.length > SECONDS) past.shift();
    sums.update(snapshot, past);
    find("notice").textContent = snapshot.bus === "connected" ? "" : "The gateway has no connection to the bus: what is shown is what it knows.";
    reconcile(models, snapshot.models, (model) => model.model, (model) => modelCard(model), (element, model) => element.update(model, rollouts.get(model.model)));
    if (!snapshot.models.length) find("notice").textContent ||= "There is no model: headrace model add.";
    tell(snapshot.bus === "connected" ? "live" : "the bus is away", snapshot.bus === "connected" ? "good" : "bad");
    document.body.dataset.drawn = "live";
  };

  readRollouts();
  const reading = setInterval(readRollouts, ROLLOUTS_MS);
  const watch = setInterval(() => {
    if (last && !document.hidden && performance.now() - heard > SILENT_MS) tell(`nothing heard for ${Math.round((performance.now() - heard) / 1000)} s`, "warn");
  }, 1000);

  (async () => {
    while (!stop.signal.aborted) {
      await looked();
      const left = new AbortController(), leave = () => { if (document.hidden) left.abort(); };
      document.addEventListener("visibilitychange", leave);
      try {
        const response = await request("/admin/v1/live", { accept: "text/event-stream", signal: AbortSignal.any([stop.signal, left.signal]) });
        await readEvents(response.body, (data, event) => {
          const said = JSON.parse(data);
          if (event === "live") take(said);
        });
        tell("connecting again", "warn");
      } catch (error) {
        if (stop.signal.aborted) return;
        if (left.signal.aborted) { tell("paused", "warn"); continue; }
        if (error.status === 401 || error.status === 403) { fail(error); return; }
        if (error instanceof Problem) tell(error.message, "bad");
        else tell("connecting again", "warn"); // The connection broke while it was read, which each browser says in its own words.
      } finally {
        document.removeEventListener("visibilitychange", leave);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  })();
  return () => { stop.abort(); clearInterval(watch); clearInterval(reading); };
}

// Browsers open six connections to one address: a tab that nobody looks at keeps none.
function looked() {
  if (!document.hidden) return undefined;
  return new Promise((resolve) => {
    const seen = () => { if (!document.hidden) { document.removeEventListener("visibilitychange", seen); resolve(); } };
    document.addEventListener("visibilitychange", seen);
  });
}

// Sum over pools; null where nothing is known.
function total(models, of) {
  const values = models.flatMap((model) => model.pools.map(of)).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) : null;
}

function known(models, of) {
  const values = models.map(of).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) : null;
}

function summary() {
  const line = draw("svg", { "aria-hidden": "true" });
  const items = {};
  const element = make("dl", { class: "sums" }, ["Output tokens", "Prompt tokens", "Running", "Waiting", "Oldest wait", "Slots", "KV cache", "Workers ready"].map((name) => {
    const value = make("span"), small = make("small");
    items[name] = { value, small };
    return make("div", {}, make("dt", {}, name), make("dd", {}, value, " ", small), name === "Output tokens" ? line : "");
  }));
  const set = (name, value, small = "") => { setText(items[name].value, value); setText(items[name].small, small); };
  return {
    element,
    update({ models }, past) {
      const slots = total(models, (pool) => pool.slots), running = total(models, (pool) => pool.running);
      const kv = total(models, (pool) => pool.kv_tokens), used = total(models, (pool) => pool.kv_tokens_used);
      set("Output tokens", perSecond(total(models, (pool) => pool.output_tokens_per_s)));
      set("Prompt tokens", perSecond(total(models, (pool) => pool.prompt_tokens_per_s)));
      set("Running", whole(known(models, (model) => model.running)), "requests");
      set("Waiting", whole(known(models, (model) => model.waiting)), "requests");
      set("Oldest wait", span(models.reduce((most, model) => model.oldest_wait_ms === null ? most : Math.max(most ?? 0, model.oldest_wait_ms), null)));
      set("Slots", slots ? percent(running / slots) : "–", slots === null ? "" : `${whole(running)} / ${whole(slots)}`);
      set("KV cache", kv ? percent(used / kv) : "–", kv === null ? "" : `${short(used)} / ${short(kv)}`);
      const workers = total(models, (pool) => pool.workers.length);
      set("Workers ready", whole(total(models, (pool) => pool.ready)), workers === null ? "" : `/ ${whole(workers)}`);
      sparkline(line, past, SECONDS);
    },
  };
}

function modelCard(model) {
  const title = make("h2", { dir: "auto" }, model.model), marks = make("span"), owner = make("span", { class: "note mono wide" });
  const failed = make("p", { class: "error" });
  const pools = make("tbody"), tenants = make("tbody"), body = make("div", { class: "model" });
  const head = (columns) => make("thead", {}, make("tr", {}, columns.map(([text, kind = ""]) => make("th", { class: kind, scope: "col" }, text))));
  const poolTable = make("div", { class: "scroll" }, make("table", { class: "records" }, make("caption", { class: "hidden" }, "Pools"), head([
    ["Version", "name"], ["Ready / desired"], ["Slots"], ["KV tokens"], ["Output"], ["Prompt", "wide"], ["In engine queue", "wide"]]), pools));
  const queue = make("div", {}, make("h3", {}, "Queue by tenant"), make("div", { class: "scroll" }, make("table", { class: "records" }, head([
    ["Tenant", "name"], ["Waiting"], ["Tokens", "wide"], ["Oldest"], ["Running"], ["Reserved", "wide"]]), tenants)));
  const noQueue = make("p", { class: "empty" }, "Nobody waits, nothing runs.");
  const workers = workerList(model.model), requests = openRequests(model.model);
  body.append(poolTable, make("div", { class: "columns" }, workers.element, make("div", {}, queue, noQueue)), requests.element);
  const element = make("section", { class: "card model", "aria-label": model.model }, make("div", { class: "above" }, make("span", {}, title, " "), marks, owner), failed, body);
  element.update = (now, rollout) => {
    setText(failed, now.error ? `${now.model}: ${now.error}.` : "");
    body.hidden = Boolean(now.error);
    setText(owner, now.owner ? `owner ${now.owner}` : "");
    const late = now.clocks.map((clock) => `${clock.process} ${(clock.ahead_ms / 1000).toFixed(1)} s`);
    marks.replaceChildren(...(rollout ? [rolloutBadge(rollout), " "] : []), badge(`stable ${now.stable}`), ...(late.length ? [" ", badge("clocks differ", "warn", late.join(", "))] : []));
    if (now.error) return;
    reconcile(pools, now.pools, (pool) => pool.version, poolRow, (row, pool) => row.update(pool, now.stable));
    reconcile(tenants, now.tenants, (each) => each.tenant, tenantRow, (row, each) => row.update(each));
    queue.hidden = !now.tenants.length;
    noQueue.hidden = Boolean(now.tenants.length);
    workers.update(now.pools);
    requests.update((now.waiting || 0) + (now.running || 0));
  };
  return element;
}

function rolloutBadge({ plan, progress }) {
  const share = progress ? `${progress.paused ? "paused, " : ""}${progress.phase} ${percent(progress.share)}` : "asked for";
  return badge(`roll-out to ${plan.to}: ${share}`, progress?.paused ? "warn" : "good", progress?.reason || "");
}

const cell = (title, kind = "", ...content) => make("td", { class: kind, "data-title": title }, content);

function poolRow(pool) {
  const slots = meter(`slots of ${pool.version}`), kv = meter(`KV cache of ${pool.version}`), have = make("span"), desired = make("span");
  const name = cell("Version", "name"), output = cell("Output"), prompt = cell("Prompt", "wide"), waiting = cell("In engine queue", "wide");
  const row = make("tr", {}, name, cell("Ready / desired", "", make("span", {}, have, " / ", desired)), cell("Slots", "", slots), cell("KV", "", kv), output, prompt, waiting);
  row.update = (now, stable) => {
    setText(name, now.version + (now.version === stable ? "" : " (not stable)"));
    name.title = now.version;
    setText(have, whole(now.ready));
    if (now.desired === null) { if (!desired.firstElementChild) desired.replaceChildren(missing("nobody decides how many there should be")); } else setText(desired, whole(now.desired));
    setMeter(slots, now.running, now.slots, `${whole(now.running)} / ${whole(now.slots)}`);
    setMeter(kv, now.kv_tokens_used, now.kv_tokens, now.kv_tokens ? percent(now.kv_tokens_used / now.kv_tokens) : "–");
    kv.title = `${whole(now.kv_tokens_used)} of ${whole(now.kv_tokens)} tokens`;
    setText(output, perSecond(now.output_tokens_per_s));
    setText(prompt, perSecond(now.prompt_tokens_per_s));
    setText(waiting, whole(now.waiting));
  };
  return row;
}

function tenantRow(first) {
  const cells = [cell("Tenant", "name"), cell("Waiting"), cell("Tokens", "wide"), cell("Oldest"), cell("Running"), cell("Reserved", "wide")];
  const row = make("tr", {}, cells);
  cells[0].title = first.tenant;
  row.update = (now) => [now.tenant, whole(now.waiting), whole(now.waiting_tokens), now.waiting ? span(now.oldest_wait_ms) : "–", whole(now.running), whole(now.reserved_tokens)]
    .forEach((text, index) => setText(cells[index], text));
  return row;
}

// Those that are not ready first, then the busiest; many are shown as cells, and in full when they are asked for.
function workerList(model) {
  const title = make("h3"), cells = make("div", { class: "cells" }), body = make("tbody");
  const none = make("p", { class: "empty" }, "There is no worker: requests wait or are refused.");
  const all = make("button", { type: "button", class: "plain small", "aria-expanded": "false" });
  let full = false, pools = [];
  const grid = make("div", { class: "scroll" }, make("table", { class: "records" }, make("thead", {}, make("tr", {},
    [["Worker", "name"], ["State", "name"], ["Slots"], ["KV"], ["Output", "wide"], [""]].map(([text, kind = ""]) => make("th", { class: kind, scope: "col" }, text || make("span", { class: "hidden" }, "Actions"))))), body));
  const element = make("div", {}, make("div", { class: "above" }, title, all), cells, none, grid);
  const update = (now) => {
    pools = now;
    const workers = pools.flatMap((pool) => pool.workers);
    const many = workers.length > FEW;
    const rank = (worker) => ["bad", "warn", "good"].indexOf(STATES[worker.state]);
    const share = (worker) => worker.slots ? worker.running / worker.slots : 0;
    const order = [...workers].sort((a, b) => rank(a) - rank(b) || (many ? share(b) - share(a) : 0) || (a.worker < b.worker ? -1 : 1));
    setText(title, `Workers ${whole(workers.length)}`);
    none.hidden = Boolean(workers.length);
    grid.hidden = !workers.length;
    cells.hidden = !many;
    all.hidden = !many;
    setText(all, full ? `Show ${FEW}` : `Show all ${workers.length}`);
    all.setAttribute("aria-expanded", String(full));
    if (many) reconcile(cells, workers, (worker) => worker.worker, () => make("i", {}, make("i")), (box, worker) => {
      box.className = worker.state === "ready" ? "" : STATES[worker.state];
      box.firstElementChild.style.height = `${(100 * Math.min(1, share(worker))).toFixed(0)}%`;
      box.title = `${worker.worker}: ${worker.state}, ${worker.running} of ${worker.slots} slots`;
    });
    reconcile(body, full || !many ? order : order.slice(0, FEW), (worker) => worker.worker, (worker) => workerRow(model, worker), (row, worker) => row.update(worker));
  };
  all.addEventListener("click", () => { full = !full; update(pools); });
  return { element, update };
}

function workerRow(model, first) {
  const name = cell("Worker", "name mono"), state = cell("State", "name"), slots = meter(`slots of ${first.worker}`), kv = meter(`KV cache of ${first.worker}`), output = cell("Output", "wide");
  const act = make("button", { type: "button", class: "plain small" }, "Drain"), actions = make("td", { class: "actions" }, act);
  const row = make("tr", {}, name, state, cell("Slots", "", slots), cell("KV", "", kv), output, actions);
  let shown = "", held = false;
  act.addEventListener("click", () => hold(model, first.worker, !held));
  row.update = (now) => {
    setText(name, now.worker);
    name.title = now.worker;
    if (shown !== now.state + now.reason) {
      shown = now.state + now.reason;
      state.replaceChildren(badge(now.state.replace("_", " "), STATES[now.state], now.reason));
      if (now.reason && now.state !== "ready") state.append(" ", make("span", { class: "soft" }, now.reason));
    }
    held = now.state === "held";
    setText(act, held ? "Resume" : "Drain");
    act.setAttribute("aria-label", `${held ? "Resume" : "Drain"} ${now.worker}`);
    act.hidden = !held && now.state !== "ready";
    setMeter(slots, now.running, now.slots, `${whole(now.running)} / ${whole(now.slots)}`);
    setMeter(kv, now.kv_tokens_used, now.kv_tokens, now.kv_tokens ? percent(now.kv_tokens_used / now.kv_tokens) : "–");
    kv.title = `${whole(now.kv_tokens_used)} of ${whole(now.kv_tokens)} tokens`;
    setText(output, perSecond(now.output_tokens_per_s));
  };
  return row;
}

const hold = (model, worker, held) => ask({
  title: held ? `Drain ${worker}?` : `Let ${worker} take work again?`,
  text: held ? "It takes nothing more; what runs there goes on to its end. Its process and engine stay, and it can be resumed." : "It is placed work at once.",
  verb: held ? "Drain it" : "Resume it",
  act: () => call(`/admin/v1/models/${encodeURIComponent(model)}/workers/${encodeURIComponent(worker)}`, { method: "PATCH", body: { held } }),
});

const cancel = (model, row) => ask({
  title: `Cancel request ${row.request_id}?`, danger: true, verb: "Cancel it",
  text: `Of tenant ${row.tenant}, ${row.state} for ${span(row.age_ms)}. Its caller is told that it was cancelled, and pays nothing.`,
  act: () => call(`/admin/v1/models/${encodeURIComponent(model)}/requests/${encodeURIComponent(row.request_id)}`, { method: "DELETE" }),
});

const REQUESTS = 50, EVERY_MS = 2000;

// The oldest open requests of a model, asked for only while they are looked at.
function openRequests(model) {
  const count = make("summary"), list = make("div"), element = make("details", {}, count, list);
  let timer = 0;
  const load = async () => {
    try {
      const { data } = await call(`/admin/v1/models/${encodeURIComponent(model)}/requests?limit=${REQUESTS}`);
      list.replaceChildren(table([
        { title: "Request", kind: "name mono", show: (row) => row.request_id },
        { title: "Tenant", kind: "name", show: (row) => row.tenant },
        { title: "State", kind: "name", show: (row) => row.state },
        { title: "Age", show: (row) => span(row.age_ms) },
        { title: "Prompt", kind: "wide", show: (row) => whole(row.prompt_tokens) },
        { title: "Output", show: (row) => `${whole(row.completion_tokens)} / ${whole(row.max_output_tokens)}` },
        { title: "", kind: "actions", show: (row) => make("button", { type: "button", class: "plain small danger", "aria-label": `Cancel ${row.request_id}`, onclick: async () => { await cancel(model, row); load(); } }, "Cancel") },
      ], data, { empty: "Nothing is open." }));
    } catch (error) {
      list.replaceChildren(make("p", { class: "error" }, error.message));
    }
  };
  // Who is about to press a button keeps it.
  const busy = () => list.contains(document.activeElement) || document.querySelector("dialog[open]");
  element.addEventListener("toggle", () => {
    clearInterval(timer);
    if (element.open) { load(); timer = setInterval(() => element.isConnected ? busy() || load() : clearInterval(timer), EVERY_MS); }
  });
  return { element, update: (open) => setText(count, `Open requests ${whole(open)}`) };
}
