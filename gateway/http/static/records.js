// Tenants, keys, prices: seen and changed, each change asked for in a question.

import { at, button, card, changed, limit, limitFields, name, names, shown } from "./cards.js";
import { ask, badge, call, checkField, choiceField, instant, listOf, make, meter, missing, numberField, setMeter, short, table, textField, whole } from "./frame.js";

const SCOPES = ["inference", "usage", "admin:keys", "admin:tenants", "admin:models", "admin:usage", "admin:prices"];
const LIMITS = [["rpm", "requests a minute"], ["input_tpm", "input tokens a minute"], ["output_tpm", "output tokens a minute"],
  ["concurrency", "at once"], ["queued_requests", "queued requests"], ["queued_tokens", "queued tokens"]];
const PRIORITIES = [["interactive,batch", "both"], ["interactive", "interactive"], ["batch", "batch"]];

export function tenants(view, { scopes }) {
  const month = async () => {
    if (!scopes.includes("admin:usage")) return null;
    try { return new Map((await call("/admin/v1/usage?by=tenant")).data.map((row) => [row.tenant, row])); } catch { return null; }
  };
  const models = async () => scopes.includes("admin:models") ? (await call("/admin/v1/models")).data.map((row) => row.name) : [];
  return shown(view, async () => [(await call("/admin/v1/tenants")).data, await month(), await models()], ([records, used, known], again) => {
    const budget = (row) => {
      const tokens = used ? (used.get(row.name)?.prompt_tokens || 0) + (used.get(row.name)?.completion_tokens || 0) : null;
      if (row.monthly_budget_tokens === null) return tokens === null ? missing("the key may not see usage") : short(tokens);
      if (tokens === null) return [missing("the key may not see usage"), ` / ${short(row.monthly_budget_tokens)}`];
      const bar = meter(`budget of ${row.name}`);
      setMeter(bar, tokens, row.monthly_budget_tokens, `${short(tokens)} / ${short(row.monthly_budget_tokens)}`);
      return bar;
    };
    return [card(`Tenants ${whole(records.length)}`, button("New tenant", "", () => newTenant(again)), table([
      { title: "Tenant", kind: "name", show: (row) => name(row.name) },
      { title: "State", kind: "name", show: (row) => row.disabled ? badge("disabled", "bad") : badge("active", "good") },
      ...LIMITS.slice(0, 4).map(([field, title]) => ({ title: title.replace(" a minute", "/min"), kind: field === "rpm" ? "" : "wide", show: (row) => limit(row.limits[field]) })),
      { title: "Weight", kind: "wide", show: (row) => row.weight },
      { title: "Tokens this month", show: budget },
      { title: "Models", kind: "name wide", show: (row) => row.models === null ? "all" : names(row.models, "none") },
      { title: "", kind: "actions", show: (row) => button("Change", row.name, () => changeTenant(row, again)) },
    ], records.map((row) => ({ ...row, off: row.disabled }))), make("p", { class: "note" }, "Limits are a tenant's for each model; ∞ is unlimited. Budgets are billed tokens of the UTC month.")),
    ownLimits(records, known, again)];
  });
}

// Limits that a tenant has for one model instead of those for all.
function ownLimits(records, known, again) {
  const rows = records.flatMap((record) => Object.entries(record.model_limits).map(([model, limits]) => ({ record, model, limits, off: record.disabled })));
  return card("Limits for one model", button("Set limits", "for one model", () => chooseLimits(records, known, again)), table([
    { title: "Tenant", kind: "name", show: (row) => name(row.record.name) },
    { title: "Model", kind: "name", show: (row) => name(row.model) },
    ...LIMITS.map(([field, title]) => ({ title: title.replace(" a minute", "/min"), kind: field === "rpm" ? "" : "wide", show: (row) => limit(row.limits[field]) })),
    { title: "", kind: "actions", show: (row) => [button("Change", `${row.record.name} for ${row.model}`, () => setLimits(row, again)), button("Remove", `${row.record.name} for ${row.model}`, () => removeLimits(row, again), "danger")] },
  ], rows, { empty: "Every tenant has the same limits for each model." }));
}

async function chooseLimits(records, known, again) {
  const fields = [textField("tenant", "tenant", "", { required: true, choices: records.map((record) => record.name) }), textField("model", "model", "", { required: true, choices: known })];
  const row = await ask({ title: "Set limits for one model", fields, verb: "Go on", act: ({ tenant, model }) => {
    const record = records.find((each) => each.name === tenant);
    if (!record) throw new Error(`There is no tenant ${tenant}.`);
    return { record, model, limits: record.model_limits[model] || record.limits };
  } });
  if (row) await setLimits(row, again);
}

async function setLimits({ record, model, limits }, again) {
  await ask({ title: `Limits of ${record.name} for ${model}`, text: "They hold instead of the tenant's limits for all models.", fields: limitFields(limits, LIMITS), verb: "Set them",
    act: (given) => call(at("tenants", record.name), { method: "PATCH", body: { model_limits: { [model]: changed(limits, given) } } }) }) && again();
}

async function removeLimits({ record, model }, again) {
  await ask({ title: `Remove the limits of ${record.name} for ${model}?`, text: "The tenant's limits for all models hold there from then on.", verb: "Remove them", danger: true,
    act: () => call(at("tenants", record.name), { method: "PATCH", body: { model_limits: { [model]: null } } }) }) && again();
}

async function newTenant(again) {
  const fields = [textField("name", "name", "", { required: true }), ...limitFields({}, LIMITS.slice(0, 4)), numberField("monthly_budget_tokens", "tokens a month"), numberField("weight", "weight in the queue", 1, { step: "any" })];
  await ask({ title: "New tenant", fields, verb: "Make it", act: ({ name: given, weight, monthly_budget_tokens, ...limits }) =>
    call("/admin/v1/tenants", { method: "POST", body: { name: given, limits, weight, monthly_budget_tokens } }) }) && again();
}

// A tenant may have no model at all: that is not the empty field, which is every model.
const modelsText = (models) => models === null ? "" : models.join(", ") || "none";
const modelsOf = (text) => text.trim() === "none" ? [] : listOf(text).length ? listOf(text) : null;

async function changeTenant(row, again) {
  const fields = [...limitFields(row.limits, LIMITS), numberField("monthly_budget_tokens", "tokens a month", row.monthly_budget_tokens),
    numberField("weight", "weight in the queue", row.weight, { step: "any" }), numberField("deadline_ms", "default deadline, ms", row.deadline_ms, { placeholder: "", min: 1 }),
    textField("models", "models, with commas; empty: all; or none", modelsText(row.models)), choiceField("priorities", "priorities", row.priorities.join(), PRIORITIES), choiceField("price_ceiling", "price ceiling", row.price_ceiling, ["economy", "standard", "premium"]),
    checkField("fallback", "may go to fallbacks", row.fallback), checkField("prefix_caching", "prefix caching", row.prefix_caching), checkField("disabled", "disabled: none of its keys is let in", row.disabled)];
  await ask({ title: `Change ${row.name}`, fields, verb: "Change it", act: (given) => {
    const of = LIMITS.map(([field]) => field);
    const limits = changed(row.limits, Object.fromEntries(of.map((field) => [field, given[field]])));
    const rest = Object.fromEntries(Object.entries(given).filter(([field]) => !of.includes(field)));
    const body = changed(row, { ...rest, models: modelsOf(rest.models), priorities: listOf(rest.priorities) });
    if (Object.keys(limits).length) body.limits = limits;
    return call(at("tenants", row.name), { method: "PATCH", body });
  } }) && again();
}

export function keys(view) {
  return shown(view, async () => (await call("/admin/v1/keys")).data, (records, again) => {
    const now = Date.now();
    const state = (row) => row.revoked_at_ms ? badge("revoked", "bad") : row.expires_at_ms && row.expires_at_ms <= now ? badge("expired", "warn") : badge("valid", "good");
    return [card(`Keys ${whole(records.length)}`, button("New key", "", () => newKey(again)), table([
      { title: "Key", kind: "name mono", show: (row) => row.id },
      { title: "Tenant", kind: "name", show: (row) => name(row.tenant) },
      { title: "State", kind: "name", show: state },
      { title: "Scopes", kind: "name wide", show: (row) => name(row.scopes.join(", ")) },
      { title: "Networks", kind: "name wide", show: (row) => names(row.addresses, "all") },
      { title: "Expires", kind: "wide", show: (row) => row.expires_at_ms ? instant(row.expires_at_ms).slice(0, 10) : "never" },
      { title: "Last used", show: (row) => instant(row.last_used_at_ms) },
      { title: "Note", kind: "name wide", show: (row) => name(row.note) },
      { title: "", kind: "actions", show: (row) => row.revoked_at_ms ? "" : [button("Change", row.id, () => changeKey(row, again)), button("Revoke", row.id, () => revoke(row, again), "danger")] },
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

const price = (micros) => (micros / 1e6).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });

export function prices(view) {
  return shown(view, async () => (await call("/admin/v1/prices")).data, (records, again) => {
    const today = new Date().toISOString().slice(0, 10);
    const of = (row) => JSON.stringify([row.model, row.version, row.tier]);
    const last = new Map(records.filter((row) => row.valid_from <= today).map((row) => [of(row), row.valid_from]));
    const state = (row) => row.valid_from > today ? badge("to come", "warn") : last.get(of(row)) === row.valid_from ? badge("valid", "good") : badge("past");
    return [card("Prices for a million tokens", button("Set price", "", () => setPrice(records[0]?.currency || "USD", again)), table([
      { title: "Model", kind: "name", show: (row) => name(row.model) },
      { title: "Version", kind: "name wide", show: (row) => row.version ? name(row.version) : "all" },
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
  const fields = [textField("model", "model", "", { required: true }), textField("version", "version; empty: all without their own"), choiceField("tier", "priority", "", [["", "both"], "interactive", "batch"]), money("input", "input", true), money("output", "output", true),
    money("cached_input", "cached input; empty: as input"), money("reasoning", "reasoning; empty: as output"), textField("valid_from", "from (UTC day); empty: tomorrow", "", { type: "date" }), textField("currency", "currency", currency),
    checkField("backdate", "a day that has begun: changes what was used already", false)];
  await ask({ title: "Set a price for a million tokens", fields, verb: "Set it", act: (given) => call("/admin/v1/prices", { method: "POST", body: { ...given, tier: given.tier || null } }) }) && again();
}
