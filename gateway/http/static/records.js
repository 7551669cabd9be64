// Tenants, keys, models, aliases, roll-outs, prices: seen and changed, each change asked for in a question.

import { DASH, ask, badge, call, checkField, choiceField, instant, listOf, make, meter, missing, numberField, percent, setMeter, short, span, table, textField, whole } from "./frame.js";

const SCOPES = ["inference", "usage", "admin:keys", "admin:tenants", "admin:models", "admin:usage", "admin:prices"];
const LIMITS = [["rpm", "requests a minute"], ["input_tpm", "input tokens a minute"], ["output_tpm", "output tokens a minute"],
  ["concurrency", "at once"], ["queued_requests", "queued requests"], ["queued_tokens", "queued tokens"]];
const POOL_LIMITS = [["queued_requests", "queued requests"], ["queued_tokens", "queued tokens"], ["tenant_queued_requests", "queued requests of a tenant"],
  ["tenant_queued_tokens", "queued tokens of a tenant"], ["kv_overbooking", "KV overbooking", 0.05]];
const at = (...parts) => `/admin/v1/${parts.map((part, index) => index % 2 ? encodeURIComponent(part) : part).join("/")}`;
const limit = (value) => value === null ? make("span", { class: "missing", title: "unlimited" }, "∞", make("span", { class: "hidden" }, "unlimited")) : whole(value);
const button = (text, onclick, kind = "") => make("button", { type: "button", class: `plain small ${kind}`, onclick }, text);
const name = (text) => make("span", { dir: "auto", title: text }, text);
const changed = (before, after) => Object.fromEntries(Object.entries(after).filter(([field, value]) => JSON.stringify(value) !== JSON.stringify(before[field])));

// A view that is read again after each change.
function shown(view, read, draw) {
  const again = async () => { view.replaceChildren(...draw(await read(), again)); document.body.dataset.drawn = "records"; };
  return again();
}

const card = (title, actions, ...content) => make("section", { class: "card" }, make("div", { class: "above" }, make("h2", {}, title), actions), content);

export function tenants(view, { scopes }) {
  const month = async () => {
    if (!scopes.includes("admin:usage")) return null;
    try { return new Map((await call("/admin/v1/usage?by=tenant")).data.map((row) => [row.tenant, row])); } catch { return null; }
  };
  return shown(view, async () => [(await call("/admin/v1/tenants")).data, await month()], ([records, used], again) => {
    const budget = (row) => {
      const tokens = used ? (used.get(row.name)?.prompt_tokens || 0) + (used.get(row.name)?.completion_tokens || 0) : null;
      if (row.monthly_budget_tokens === null) return tokens === null ? missing("the key may not see usage") : short(tokens);
      if (tokens === null) return [missing("the key may not see usage"), ` / ${short(row.monthly_budget_tokens)}`];
      const bar = meter(`budget of ${row.name}`);
      setMeter(bar, tokens, row.monthly_budget_tokens, `${short(tokens)} / ${short(row.monthly_budget_tokens)}`);
      return bar;
    };
    return [card(`Tenants ${whole(records.length)}`, button("New tenant", () => newTenant(again)), table([
      { title: "Tenant", kind: "name", show: (row) => name(row.name) },
      { title: "State", kind: "name", show: (row) => row.disabled ? badge("disabled", "bad") : badge("active", "good") },
      ...LIMITS.slice(0, 4).map(([field, title]) => ({ title: title.replace(" a minute", "/min"), kind: field === "rpm" ? "" : "wide", show: (row) => limit(row.limits[field]) })),
      { title: "Weight", kind: "wide", show: (row) => row.weight },
      { title: "Tokens this month", show: budget },
      { title: "Models", kind: "name wide", show: (row) => row.models === null ? "all" : name(row.models.join(", ")) },
      { title: "", kind: "actions", show: (row) => button("Change", () => changeTenant(row, again)) },
    ], records.map((row) => ({ ...row, off: row.disabled }))), make("p", { class: "note" }, "Limits are a tenant's for each model; ∞ is unlimited. Budgets are billed tokens of the UTC month."))];
  });
}

const limitFields = (limits, names = LIMITS) => names.map(([field, title, step]) => numberField(field, title, limits[field], step ? { step, placeholder: "" } : {}));

async function newTenant(again) {
  const fields = [textField("name", "name", "", { required: true }), ...limitFields({}, LIMITS.slice(0, 4)), numberField("monthly_budget_tokens", "tokens a month"), numberField("weight", "weight in the queue", 1, { step: "any" })];
  await ask({ title: "New tenant", fields, verb: "Make it", act: ({ name: given, weight, monthly_budget_tokens, ...limits }) =>
    call("/admin/v1/tenants", { method: "POST", body: { name: given, limits, weight, monthly_budget_tokens } }) }) && again();
}

async function changeTenant(row, again) {
  const fields = [...limitFields(row.limits), numberField("monthly_budget_tokens", "tokens a month", row.monthly_budget_tokens),
    numberField("weight", "weight in the queue", row.weight, { step: "any" }), numberField("deadline_ms", "default deadline, ms", row.deadline_ms, { placeholder: "", min: 1 }),
    textField("models", "models, with commas; empty: all", (row.models || []).join(", ")), choiceField("price_ceiling", "price ceiling", row.price_ceiling, ["economy", "standard", "premium"]),
    checkField("fallback", "may go to fallbacks", row.fallback), checkField("prefix_caching", "prefix caching", row.prefix_caching), checkField("disabled", "disabled: none of its keys is let in", row.disabled)];
  await ask({ title: `Change ${row.name}`, fields, verb: "Change it", act: (given) => {
    const names = LIMITS.map(([field]) => field);
    const limits = changed(row.limits, Object.fromEntries(names.map((field) => [field, given[field]])));
    const rest = Object.fromEntries(Object.entries(given).filter(([field]) => !names.includes(field)));
    const body = changed(row, { ...rest, models: listOf(rest.models).length ? listOf(rest.models) : null });
    if (Object.keys(limits).length) body.limits = limits;
    return call(at("tenants", row.name), { method: "PATCH", body });
  } }) && again();
}

export function keys(view) {
  return shown(view, async () => (await call("/admin/v1/keys")).data, (records, again) => {
    const now = Date.now();
    const state = (row) => row.revoked_at_ms ? badge("revoked", "bad") : row.expires_at_ms && row.expires_at_ms <= now ? badge("expired", "warn") : badge("valid", "good");
    return [card(`Keys ${whole(records.length)}`, button("New key", () => newKey(again)), table([
      { title: "Key", kind: "name mono", show: (row) => row.id },
      { title: "Tenant", kind: "name", show: (row) => name(row.tenant) },
      { title: "State", kind: "name", show: state },
      { title: "Scopes", kind: "name wide", show: (row) => name(row.scopes.join(", ")) },
      { title: "Networks", kind: "name wide", show: (row) => row.addresses.length ? name(row.addresses.join(", ")) : "all" },
      { title: "Expires", kind: "wide", show: (row) => row.expires_at_ms ? instant(row.expires_at_ms).slice(0, 10) : "never" },
      { title: "Last used", show: (row) => instant(row.last_used_at_ms) },
      { title: "Note", kind: "name wide", show: (row) => name(row.note) },
      { title: "", kind: "actions", show: (row) => row.revoked_at_ms ? "" : [button("Change", () => changeKey(row, again)), button("Revoke", () => revoke(row, again), "danger")] },
    ], records.map((row) => ({ ...row, off: Boolean(row.revoked_at_ms) }))))];
  });
}

const day = (ms) => ms ? new Date(ms).toISOString().slice(0, 10) : "";
const expiry = (text) => text ? Date.parse(text) : 0;

async function newKey(again) {
  const fields = [textField("tenant", "tenant", "", { required: true }), textField("note", "note"), textField("addresses", "networks, with commas; empty: all"),
    textField("expires", "expires (UTC day)", "", { type: "date" }), ...SCOPES.map((scope) => checkField(scope, scope, scope === "inference" || scope === "usage"))];
  const made = await ask({ title: "New key", text: "An admin key does no inference: make two keys.", fields, verb: "Make it", act: (given) => call("/admin/v1/keys", { method: "POST", body: {
    tenant: given.tenant, note: given.note, addresses: listOf(given.addresses), expires_at_ms: expiry(given.expires), scopes: SCOPES.filter((scope) => given[scope]) } }) });
  if (!made) return;
  const secret = make("div", { class: "secret", tabindex: 0 }, made.key);
  await ask({ title: `The key ${made.id}`, text: "It is shown this once and kept nowhere: copy it now.", fields: [{ name: "secret", element: secret, input: secret, value: () => "" }], verb: "I have it", act: async () => true });
  await again();
}

async function changeKey(row, again) {
  const fields = [textField("note", "note", row.note), textField("addresses", "networks, with commas; empty: all", row.addresses.join(", ")), textField("expires", "expires (UTC day); empty: never", day(row.expires_at_ms), { type: "date" })];
  await ask({ title: `Change ${row.id}`, fields, verb: "Change it", act: (given) => {
    const body = changed(row, { note: given.note, addresses: listOf(given.addresses) });
    if (given.expires !== day(row.expires_at_ms)) body.expires_at_ms = expiry(given.expires);
    return call(at("keys", row.id), { method: "PATCH", body });
  } }) && again();
}

async function revoke(row, again) {
  await ask({ title: `Revoke ${row.id}?`, text: `Tenant ${row.tenant}${row.note ? `, ${row.note}` : ""}. It is out at every gateway within a second, for good.`, verb: "Revoke it", danger: true,
    act: () => call(at("keys", row.id), { method: "DELETE" }) }) && again();
}

export function models(view) {
  return shown(view, async () => Promise.all(["models", "rollouts", "aliases"].map(async (path) => (await call(`/admin/v1/${path}`)).data)), ([records, rollouts, aliases], again) => [
    card(`Models ${whole(records.length)}`, "", table([
      { title: "Model", kind: "name", show: (row) => name(row.name) },
      { title: "Stable", kind: "name", show: (row) => name(row.stable) },
      { title: "Queued requests", show: (row) => whole(row.limits.queued_requests) },
      { title: "of a tenant", kind: "wide", show: (row) => whole(row.limits.tenant_queued_requests) },
      { title: "Queued tokens", kind: "wide", show: (row) => short(row.limits.queued_tokens) },
      { title: "of a tenant", kind: "wide", show: (row) => short(row.limits.tenant_queued_tokens) },
      { title: "KV overbooking", kind: "wide", show: (row) => row.limits.kv_overbooking },
      { title: "Fallbacks", kind: "name wide", show: (row) => row.fallbacks.length ? name(row.fallbacks.join(", ")) : DASH },
      { title: "", kind: "actions", show: (row) => row.removed ? badge("being removed", "warn") : button("Change", () => changeModel(row, again)) },
    ], records)),
    card("Roll-outs", "", table([
      { title: "Model", kind: "name", show: (row) => name(row.plan.model) },
      { title: "To", kind: "name", show: (row) => name(row.plan.to) },
      { title: "State", kind: "name", show: rolloutState },
      { title: "Share", show: (row) => row.progress ? percent(row.progress.share) : missing("its owner has not begun") },
      { title: "Steps", kind: "wide", show: (row) => row.plan.steps.map((step) => `${step} %`).join(", ") },
      { title: "Held", kind: "wide", show: (row) => row.progress ? `${span(row.progress.held_ms)} of ${span(row.plan.hold_ms)}` : DASH },
      { title: "Why", kind: "long", show: (row) => row.progress?.reason || "" },
      { title: "", kind: "actions", show: (row) => rolloutActions(row, again) },
    ], rollouts, { empty: "No model has had one: headrace rollout start." })),
    card("Aliases", button("Set alias", () => setAlias(null, again)), table([
      { title: "Alias", kind: "name", show: (row) => name(row.name) },
      { title: "Models", kind: "name", show: (row) => name(row.models.length ? row.models.join(", ") : "all") },
      { title: "Order", kind: "name", show: (row) => row.order },
      { title: "", kind: "actions", show: (row) => [button("Change", () => setAlias(row, again)), row.created_at_ms ? button("Remove", () => removeAlias(row, again), "danger") : ""] },
    ], aliases)),
  ]);
}

const OVER = { promoted: "good", aborted: "warn", stopped: "bad" };

function rolloutState(row) {
  const phase = row.progress?.phase || "asked for";
  return badge(row.progress?.paused && !OVER[phase] ? `${phase}, paused` : phase, OVER[phase] || "");
}

function rolloutActions(row, again) {
  if (row.progress && OVER[row.progress.phase]) return "";
  const want = (wanted, title, text, danger = false) => button(title, async () => {
    await ask({ title: `${title} the roll-out of ${row.plan.model} to ${row.plan.to}?`, text, verb: title, danger, act: () => call(at("models", row.plan.model, "rollout"), { method: "PATCH", body: { wanted } }) }) && again();
  }, danger ? "danger" : "");
  return [row.progress?.paused ? want("run", "Resume", "It goes on with its present step.") : want("pause", "Pause", "Its share stays as it is."),
    want("promote", "Promote", "All requests go to the new version at once."), want("abort", "Abort", "All requests go to the stable version at once.", true)];
}

async function changeModel(row, again) {
  const fields = [...limitFields(row.limits, POOL_LIMITS), textField("fallbacks", "fallbacks, with commas", row.fallbacks.join(", "))];
  await ask({ title: `Change ${row.name}`, fields, verb: "Change it", act: ({ fallbacks, ...limits }) => {
    const body = changed(row.limits, limits);
    if (listOf(fallbacks).join() !== row.fallbacks.join()) body.fallbacks = listOf(fallbacks);
    return call(at("models", row.name, "limits"), { method: "PATCH", body });
  } }) && again();
}

async function setAlias(row, again) {
  const fields = [textField("name", "alias", row?.name || "", { required: true, readonly: Boolean(row) }), textField("models", "models in order, with commas; empty: all", (row?.models || []).join(", ")),
    choiceField("order", "order", row?.order || "listed", [["listed", "as listed"], ["cheapest", "cheapest first"], ["dearest", "dearest first"], ["soonest", "least busy first"]])];
  await ask({ title: row ? `Change ${row.name}` : "Set an alias", fields, verb: "Set it", act: (given) => call(at("aliases", given.name), { method: "PUT", body: { models: listOf(given.models), order: given.order } }) }) && again();
}

async function removeAlias(row, again) {
  await ask({ title: `Remove the alias ${row.name}?`, text: "Who names it is refused from then on, or gets what is built in.", verb: "Remove it", danger: true, act: () => call(at("aliases", row.name), { method: "DELETE" }) }) && again();
}

const price = (micros) => (micros / 1e6).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });

export function prices(view) {
  return shown(view, async () => (await call("/admin/v1/prices")).data, (records, again) => {
    const today = new Date().toISOString().slice(0, 10);
    const last = new Map(records.filter((row) => row.valid_from <= today).map((row) => [row.model + "\n" + row.tier, row.valid_from]));
    const state = (row) => row.valid_from > today ? badge("to come", "warn") : last.get(row.model + "\n" + row.tier) === row.valid_from ? badge("valid", "good") : badge("past");
    return [card("Prices for a million tokens", button("Set price", () => setPrice(records[0]?.currency || "USD", again)), table([
      { title: "Model", kind: "name", show: (row) => name(row.model) },
      { title: "Priority", kind: "name", show: (row) => row.tier },
      { title: "From (UTC)", kind: "name", show: (row) => row.valid_from },
      { title: "State", kind: "name", show: state },
      { title: "Input", show: (row) => price(row.input) },
      { title: "Cached", kind: "wide", show: (row) => price(row.cached_input) },
      { title: "Output", show: (row) => price(row.output) },
      { title: "Reasoning", kind: "wide", show: (row) => price(row.reasoning) },
      { title: "Currency", kind: "name", show: (row) => row.currency },
    ], records, { empty: "No prices are set: usage is counted, and costs nothing." }))];
  });
}

async function setPrice(currency, again) {
  const money = (field, title, required = false) => textField(field, title, "", { inputmode: "decimal", required, placeholder: "0.15" });
  const fields = [textField("model", "model", "", { required: true }), choiceField("tier", "priority", "", [["", "both"], "interactive", "batch"]), money("input", "input", true), money("output", "output", true),
    money("cached_input", "cached input; empty: as input"), money("reasoning", "reasoning; empty: as output"), textField("valid_from", "from (UTC day); empty: tomorrow", "", { type: "date" }), textField("currency", "currency", currency),
    checkField("backdate", "a day that has begun: changes what was used already", false)];
  await ask({ title: "Set a price for a million tokens", fields, verb: "Set it", act: (given) => call("/admin/v1/prices", { method: "POST", body: { ...given, tier: given.tier || null } }) }) && again();
}
