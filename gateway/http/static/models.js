// Models: bounds of their queues and of their workers, versions, roll-outs, aliases; each change is asked for in a question.

import { at, button, card, changed, limit, limitFields, name, names, shown } from "./cards.js";
import { DASH, ask, badge, call, choiceField, listOf, make, missing, numberField, percent, short, span, table, textField, whole } from "./frame.js";

const EVERY_MS = 5000;
const QUEUE = [["queued_requests", "queued requests"], ["queued_tokens", "queued tokens"], ["tenant_queued_requests", "queued requests of a tenant"],
  ["tenant_queued_tokens", "queued tokens of a tenant"], ["body_bytes", "bytes of large bodies"], ["tenant_body_bytes", "bytes of a tenant's large bodies"],
  ["kv_overbooking", "KV overbooking", "any"], ["cached_input_share", "share of a cached input token", "any"]];
const WORKERS = [["replicas_min", "workers at least"], ["replicas_spare", "spare workers"], ["replicas_hold_s", "seconds before one is taken away"]];

export function open(view) {
  const read = () => Promise.all(["models", "versions", "pools", "rollouts", "aliases"].map(async (path) => (await call(`/admin/v1/${path}`)).data));
  return shown(view, read, ([models, versions, pools, rollouts, aliases], again) => {
    const of = (row) => versions.filter((each) => each.model === row.name).map((each) => each.version);
    return [queues(models, of, again), workers(models, pools, again), rolloutCard(models, of, rollouts, again), aliasCard(aliases, models, again)];
  }, EVERY_MS);
}

// Queues and workers --------------------------------------------------------------------------------------------------

const queues = (models, versions, again) => card(`Models ${whole(models.length)}`, "", table([
  { title: "Model", kind: "name", show: (row) => name(row.name) },
  { title: "Stable", kind: "name", show: (row) => name(row.stable) },
  { title: "Other versions", kind: "name wide", show: (row) => names(versions(row).filter((each) => each !== row.stable)) },
  { title: "Queued requests", show: (row) => whole(row.limits.queued_requests) },
  { title: "of a tenant", kind: "wide", show: (row) => whole(row.limits.tenant_queued_requests) },
  { title: "Queued tokens", kind: "wide", show: (row) => short(row.limits.queued_tokens) },
  { title: "of a tenant", kind: "wide", show: (row) => short(row.limits.tenant_queued_tokens) },
  { title: "KV overbooking", kind: "wide", show: (row) => row.limits.kv_overbooking },
  { title: "Fallbacks", kind: "name wide", show: (row) => names(row.fallbacks) },
  { title: "", kind: "actions", show: (row) => row.removed ? badge("being removed", "warn") : button("Change", `the queue of ${row.name}`, () => changeQueue(row, models, again)) },
], models, { empty: "There is no model: headrace model add." }));

async function changeQueue(row, models, again) {
  const others = models.map((each) => each.name).filter((each) => each !== row.name);
  const fields = [...limitFields(row.limits, QUEUE, { required: true }), textField("fallbacks", "fallbacks, with commas", row.fallbacks.join(", "), { choices: others })];
  await ask({ title: `Change the queue of ${row.name}`, text: "What waits stays, also beyond a lower bound.", fields, verb: "Change it", act: ({ fallbacks, ...limits }) => {
    const body = changed(row.limits, limits);
    if (JSON.stringify(listOf(fallbacks)) !== JSON.stringify(row.fallbacks)) body.fallbacks = listOf(fallbacks);
    return call(at("models", row.name, "limits"), { method: "PATCH", body });
  } }) && again();
}

function workers(models, pools, again) {
  const pool = new Map(pools.map((each) => [each.model, each]));
  const told = (row, show) => pool.has(row.name) ? show(pool.get(row.name)) : missing("its owner does not answer");
  return card("Workers", "", table([
    { title: "Model", kind: "name", show: (row) => name(row.name) },
    { title: "Ready", show: (row) => told(row, (each) => whole(each.ready)) },
    { title: "Loading", kind: "wide", show: (row) => told(row, (each) => whole(each.loading)) },
    { title: "Leaving", kind: "wide", show: (row) => told(row, (each) => whole(each.leaving)) },
    { title: "Desired", show: (row) => told(row, (each) => each.reason === "unknown" ? missing("its owner has just come, and knows nothing yet") : whole(each.desired)) },
    { title: "Because", kind: "name wide", show: (row) => told(row, (each) => each.reason.replaceAll("_", " ")) },
    { title: "Least", show: (row) => whole(row.limits.replicas_min) },
    { title: "Most", show: (row) => limit(row.limits.replicas_max) },
    { title: "Spare", kind: "wide", show: (row) => whole(row.limits.replicas_spare) },
    { title: "Kept for", kind: "wide", show: (row) => span(row.limits.replicas_hold_s * 1000) },
    { title: "", kind: "actions", show: (row) => row.removed ? "" : button("Change", `the workers of ${row.name}`, () => changeWorkers(row, again)) },
  ], models, { empty: "There is no model." }), make("p", { class: "note" }, "How many there should be; whoever starts workers follows it: headrace up --autoscale, or an autoscaler."));
}

async function changeWorkers(row, again) {
  const [least, ...rest] = limitFields(row.limits, WORKERS, { required: true });
  const fields = [least, numberField("replicas_max", "workers at most", row.limits.replicas_max, { min: 1 }), ...rest];
  await ask({ title: `Change the workers of ${row.name}`, text: "A lower most takes workers away; what runs there goes on to its end. A least of 0 lets the model go without one while nobody asks for it.",
    fields, verb: "Change it", act: (given) => call(at("models", row.name, "limits"), { method: "PATCH", body: changed(row.limits, given) }) }) && again();
}

// Roll-outs -----------------------------------------------------------------------------------------------------------

const OVER = { promoted: "good", aborted: "warn", stopped: "bad" };
const isOpen = (row) => !OVER[row.progress?.phase];

const rolloutCard = (models, versions, rollouts, again) => card("Roll-outs", button("Start roll-out", "", () => chooseRollout(models, versions, rollouts, again)), table([
  { title: "Model", kind: "name", show: (row) => name(row.plan.model) },
  { title: "To", kind: "name", show: (row) => name(row.plan.to) },
  { title: "State", kind: "name", show: rolloutState },
  { title: "Share", show: (row) => row.progress ? percent(row.progress.share) : missing("its owner has not begun") },
  { title: "Steps", kind: "name wide", show: (row) => name(steps(row.plan)) },
  { title: "Held", kind: "wide", show: (row) => row.progress ? `${span(row.progress.held_ms)} of ${span(row.plan.hold_ms)}` : DASH },
  { title: "Why", kind: "long wide", show: (row) => make("span", {}, row.progress?.reason || (row.progress?.waits_for ? `waits for ${row.progress.waits_for}` : "")) },
  { title: "", kind: "actions", show: (row) => rolloutActions(row, again) },
], rollouts, { empty: "No model has had one." }), rollouts.filter((row) => row.progress && isOpen(row)).map(evidence));

const steps = (plan) => [...(plan.shadow ? [`copies of ${plan.shadow} %`] : []), ...plan.steps.map((step) => `${step} %`)].join(", ") + (plan.tenants.length ? ` of ${plan.tenants.join(", ")}` : "");

function rolloutState(row) {
  const phase = row.progress?.phase || "asked for";
  return badge(row.progress?.paused && !OVER[phase] ? `${phase}, paused` : phase, OVER[phase] || (row.progress?.paused ? "warn" : ""));
}

const power = (log) => log < 20 ? Number(Math.exp(log).toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }) : `10^${Math.round(log / Math.LN10)}`;

// What the judge has seen, by criterion.
function evidence({ plan, progress }) {
  const sum = (arm) => whole(progress.evidence.reduce((all, step) => all + step[arm], 0));
  const verdict = (row) => row.log_against >= row.log_stop ? badge("worse", "bad") : row.log_for >= row.log_go_on ? badge("not worse", "good") : badge("not known yet");
  const served = `${plan.model}: ${sum("canary")} answered by ${plan.to}, ${sum("stable")} by ${progress.stable}` + (progress.spilled ? `, ${whole(progress.spilled)} given back to it` : "") + ".";
  return make("div", { class: "evidence" }, make("p", { class: "note", dir: "auto" }, served),
    progress.bad_workers.length ? make("p", { class: "error" }, `Bad workers, which get nothing more: ${progress.bad_workers.join(", ")}.`) : "",
    table([
      { title: "Criterion", kind: "name", show: (row) => row.criterion.replaceAll("_", " ") },
      { title: "Bad, new", show: (row) => whole(row.canary) },
      { title: "Bad, stable", show: (row) => whole(row.stable) },
      { title: "e against it", kind: "wide", show: (row) => `${power(row.log_against)} of ${power(row.log_stop)}` },
      { title: "e for it", kind: "wide", show: (row) => `${power(row.log_for)} of ${power(row.log_go_on)}` },
      { title: "Verdict", show: verdict },
    ], progress.measures, { empty: "No evidence yet." }));
}

async function chooseRollout(models, versions, rollouts, again) {
  const free = models.filter((row) => !row.removed && !rollouts.some((each) => each.plan.model === row.name && isOpen(each)));
  const next = (row) => versions(row).filter((each) => each !== row.stable);
  const choices = free.filter((row) => next(row).length);
  if (!choices.length) {
    await ask({ title: "There is nothing to roll out", text: "No model without an open roll-out has a second version: headrace model publish.", verb: "Well", act: () => true });
    return;
  }
  const model = choiceField("model", "model", choices[0].name, choices.map((row) => row.name));
  const version = choiceField("to", "new version", "", []);
  const fill = () => {
    const row = choices.find((each) => each.name === model.value());
    version.input.replaceChildren(...next(row).reverse().map((each) => make("option", { value: each }, each)));
  };
  model.input.addEventListener("change", fill);
  fill();
  const fields = [model, version, textField("steps", "shares in percent, with commas", "1, 5, 25, 50, 100", { required: true }), numberField("hold_s", "least seconds of a step", 600, { placeholder: "", required: true }),
    choiceField("by", "what keeps its side", "request", ["request", "tenant", "conversation"]), numberField("shadow", "copies before, percent; 0: none", 20, { step: "any", max: 100, placeholder: "", required: true }),
    textField("tenants", "tenants, with commas; empty: all")];
  await ask({ title: "Start a roll-out", text: "The new version gets a growing share of the requests for as long as it is not worse. At 100 % it becomes the stable one.", fields, verb: "Start it",
    act: (given) => call(at("models", given.model, "rollout"), { method: "POST", body: {
      to: given.to, steps: listOf(given.steps).map(share), hold_ms: given.hold_s * 1000, by: given.by, shadow: given.shadow, tenants: listOf(given.tenants) } }) }) && again();
}

function share(text) {
  const number = Number(text.replace(/ *%$/, ""));
  if (!Number.isFinite(number)) throw new Error(`${text} is no share in percent.`);
  return number;
}

function rolloutActions(row, again) {
  if (!isOpen(row)) return "";
  const { model, to } = row.plan;
  const want = (wanted, title, text, danger = false) => button(title, `the roll-out of ${model}`, async () => {
    await ask({ title: `${title} the roll-out of ${model} to ${to}?`, text, verb: `${title} it`, danger, act: () => call(at("models", model, "rollout"), { method: "PATCH", body: { wanted } }) }) && again();
  }, danger ? "danger" : "");
  return [row.progress?.paused ? want("run", "Resume", "It goes on with its present step.") : want("pause", "Pause", "Its share stays as it is; the judge goes on watching."),
    want("promote", "Promote", "All requests go to the new version at once, whatever the evidence.", true), want("abort", "Abort", "All requests go to the stable version at once; what runs on the new one stays to its end.", true)];
}

// Aliases -------------------------------------------------------------------------------------------------------------

const ORDERS = [["listed", "as listed"], ["cheapest", "cheapest first"], ["dearest", "dearest first"], ["soonest", "least busy first"]];

const aliasCard = (aliases, models, again) => card("Aliases", button("Set alias", "", () => setAlias(null, models, again)), table([
  { title: "Alias", kind: "name", show: (row) => name(row.name) },
  { title: "Models", kind: "name", show: (row) => names(row.models, "all") },
  { title: "Order", kind: "name wide", show: (row) => (ORDERS.find(([order]) => order === row.order) || [])[1] || row.order },
  { title: "", kind: "actions", show: (row) => [button("Change", `the alias ${row.name}`, () => setAlias(row, models, again)), row.created_at_ms ? button("Remove", `the alias ${row.name}`, () => removeAlias(row, again), "danger") : ""] },
], aliases, { empty: "No name stands for others." }));

async function setAlias(row, models, again) {
  const fields = [textField("name", "alias", row?.name || "", { required: true, readonly: Boolean(row) }), textField("models", "models in order, with commas; empty: all", (row?.models || []).join(", "), { choices: models.map((each) => each.name) }),
    choiceField("order", "order", row?.order || "listed", ORDERS)];
  await ask({ title: row ? `Change ${row.name}` : "Set an alias", fields, verb: "Set it", act: (given) => call(at("aliases", given.name), { method: "PUT", body: { models: listOf(given.models), order: given.order } }) }) && again();
}

async function removeAlias(row, again) {
  await ask({ title: `Remove the alias ${row.name}?`, text: "Who names it is refused from then on, or gets what is built in.", verb: "Remove it", danger: true, act: () => call(at("aliases", row.name), { method: "DELETE" }) }) && again();
}
