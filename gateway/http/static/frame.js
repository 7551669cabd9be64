// What all pages share: the key, calls of the API, elements whose texts are text, figures, and questions.

export const find = (id) => document.getElementById(id);

// The key. It comes by hand or in a link's fragment, which no server is sent; it stays in this tab alone. ----------

function takeFragment() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return false;
  sessionStorage.setItem("key", given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

const field = find("key");
const listeners = [];
takeFragment();
field.value = sessionStorage.getItem("key") || "";

export const key = () => field.value.trim();

export function onKey(listener) {
  listeners.push(listener);
}

function keyChanged() {
  sessionStorage.setItem("key", key());
  for (const listener of listeners) listener();
}

field.addEventListener("change", keyChanged);
find("key-form").addEventListener("submit", (event) => { event.preventDefault(); field.blur(); keyChanged(); });
addEventListener("hashchange", () => {
  if (!takeFragment()) return;
  field.value = sessionStorage.getItem("key");
  keyChanged();
});

// The API. The key travels in a header, never in an address or a cookie: no other page can use it. -----------------

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function problemOf(response) {
  let text = `The server answered ${response.status}.`;
  try { text = (await response.json()).error.message || text; } catch { /* not ours: a proxy's page */ }
  const pause = response.headers.get("retry-after"), id = response.headers.get("x-request-id");
  return new Problem(text + (pause ? ` Try again in ${pause} s.` : "") + (id && response.status >= 500 ? ` (request ${id})` : ""), response.status);
}

export async function request(path, { method = "GET", body, accept, signal } = {}) {
  const headers = { authorization: `Bearer ${key()}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (accept) headers.accept = accept;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(`The server cannot be reached: ${error.message}`);
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

export const call = async (path, options) => (await request(path, options)).json();

// Server-sent events of a response: onData(data, event) for each data line.
export async function readEvents(body, onData) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = "message";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("event: ")) event = line.slice(7);
      else if (line.startsWith("data: ")) onData(line.slice(6), event);
      else if (!line) event = "message";
    }
  }
}

// Elements. Children are elements or texts; a text is never read as HTML. -------------------------------------------

export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== "") element.append(child);
  return element;
}

export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

// One element for each item, kept from one drawing to the next, so that focus and what is open stay.
export function reconcile(parent, items, keyOf, create, update) {
  const kept = parent.kept ||= new Map();
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  for (const [name, element] of kept) if (!wanted.has(name)) { element.remove(); kept.delete(name); }
  let previous = null;
  for (const [name, item] of wanted) {
    let element = kept.get(name);
    if (!element) kept.set(name, element = create(item));
    if (update) update(element, item);
    const place = previous ? previous.nextElementSibling : parent.firstElementChild;
    if (place !== element) parent.insertBefore(element, place);
    previous = element;
  }
}

export function table(columns, rows, { empty = "None.", caption = "" } = {}) {
  if (!rows.length) return make("p", { class: "empty" }, empty);
  const head = columns.map(({ title, kind = "" }) => make("th", { class: kind, scope: "col" }, title));
  const lines = rows.map((row) => make("tr", { class: row.off ? "off" : false },
    columns.map(({ title, kind = "", show }) => make("td", { class: kind, "data-title": title || false }, show(row)))));
  return make("div", { class: "scroll" }, make("table", { class: "records" }, caption ? make("caption", {}, caption) : "",
    make("thead", {}, make("tr", {}, head)), make("tbody", {}, lines)));
}

// Figures. What is not known is a dash, never 0. ---------------------------------------------------------------------

const wholeFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const shortFormat = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const DASH = "–";
const known = (show) => (value) => value === null || value === undefined ? DASH : show(value);

export const whole = known((value) => wholeFormat.format(value));
export const short = known((value) => value < 10000 ? wholeFormat.format(value) : shortFormat.format(value));
export const perSecond = known((value) => `${value < 100 ? value.toFixed(1) : short(value)}/s`);
export const percent = known((share) => share > 0 && share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %`);
export const span = known((ms) => {
  if (ms < 1) return `${Number(ms.toPrecision(2))} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  return ms < 3599500 ? two(Math.round(ms / 1000), "min", "s") : two(Math.round(ms / 60000), "h", "min");
});
const two = (all, large, small) => `${Math.floor(all / 60)} ${large}` + (all % 60 ? ` ${all % 60} ${small}` : "");
export const instant = (ms) => ms ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") + "Z" : DASH;
export const missing = (why = "not known") => make("span", { class: "missing", title: why }, DASH, make("span", { class: "hidden" }, why));

export function badge(text, kind = "", title = "") {
  return make("span", { class: `badge ${kind}`, title: title || false }, text);
}

// A bar with its figure; update it by setMeter.
export function meter(label) {
  const inner = make("i");
  return make("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": 0 }, make("i", {}, inner), make("span"));
}

export function setMeter(element, value, most, text) {
  const share = most ? Math.min(1, value / most) : 0;
  element.firstElementChild.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  element.classList.toggle("high", share > 0.9);
  element.setAttribute("aria-valuenow", value ?? 0);
  element.setAttribute("aria-valuemax", most ?? 0);
  element.setAttribute("aria-valuetext", text);
  setText(element.lastElementChild, text);
}

// Questions ----------------------------------------------------------------------------------------------------------

// Asks; `act` gets the form's values, and what it throws is shown. Resolves to what act gave, or null.
export function ask({ title, text = "", fields = [], verb, danger = false, act }) {
  return new Promise((resolve) => {
    const failed = make("p", { class: "error", role: "alert" });
    const go = make("button", { class: danger ? "danger" : false }, verb);
    const back = make("button", { type: "button", class: "plain" }, "Cancel");
    const form = make("form", { method: "dialog" }, make("h2", {}, title), text ? make("p", {}, text) : "",
      fields.length ? make("div", { class: "fields" }, fields.map((each) => each.element)) : "", failed,
      make("div", { class: "buttons" }, back, go));
    const dialog = make("dialog", { "aria-label": title }, form);
    const before = document.activeElement;
    let result = null;
    dialog.addEventListener("close", () => { dialog.remove(); before?.focus?.(); resolve(result); });
    back.addEventListener("click", () => dialog.close());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      failed.textContent = "";
      try {
        result = await act(Object.fromEntries(fields.map((each) => [each.name, each.value()])));
        dialog.close();
      } catch (error) {
        failed.textContent = error.message;
        go.disabled = false;
      }
    });
    document.body.append(dialog);
    dialog.showModal();
    (fields[0]?.input || back).focus();
  });
}

// Fields of a question; each has a name, its element, and what it holds.
export function textField(name, label, value = "", { choices, ...options } = {}) {
  const list = choices && make("datalist", { id: `choices-${name}` }, choices.map((each) => make("option", { value: each })));
  const input = make("input", { value, autocomplete: "off", spellcheck: "false", list: list && list.id, ...options });
  return { name, input, element: make("label", {}, label, input, list), value: () => input.value.trim() };
}

export function numberField(name, label, value = "", options = {}) {
  const found = textField(name, label, value ?? "", { type: "number", min: 0, step: 1, placeholder: "unlimited", ...options });
  return { ...found, value: () => found.input.value === "" ? null : Number(found.input.value) };
}

export function choiceField(name, label, value, choices) {
  const input = make("select", {}, choices.map((each) => {
    const [of, shown] = Array.isArray(each) ? each : [each, each];
    return make("option", { value: of, selected: of === value }, shown);
  }));
  return { name, input, element: make("label", {}, label, input), value: () => input.value };
}

export function checkField(name, label, value) {
  const input = make("input", { type: "checkbox", checked: Boolean(value) });
  return { name, input, element: make("label", { class: "check" }, input, label), value: () => input.checked };
}

export const listOf = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);
