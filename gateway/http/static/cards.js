// What views of records share: cards with tables, each change asked for in a question, and then read again.

import { DASH, find, make, numberField, whole } from "./frame.js";

export const at = (...parts) => `/admin/v1/${parts.map((part, index) => index % 2 ? encodeURIComponent(part) : part).join("/")}`;
export const limit = (value) => value === null ? make("span", { class: "missing", title: "unlimited" }, "∞", make("span", { class: "hidden" }, "unlimited")) : whole(value);
export const name = (text) => make("span", { dir: "auto", title: text }, text);
export const names = (list, none = DASH) => list.length ? name(list.join(", ")) : none;

// `of`: what it is about, for who hears the page.
export const button = (text, of, onclick, kind = "") => make("button", { type: "button", class: `plain small ${kind}`, "aria-label": of ? `${text} ${of}` : false, onclick }, text);

export const card = (title, actions, ...content) => make("section", { class: "card", "aria-label": title }, make("div", { class: "above" }, make("h2", {}, title), actions), content);

// The fields of `after` that differ from `before`.
export const changed = (before, after) => Object.fromEntries(Object.entries(after).filter(([field, value]) => JSON.stringify(value) !== JSON.stringify(before[field])));

// Number fields of [field, title, step]; one whose value may be null shows that empty is unlimited.
export const limitFields = (limits, of, { required = false } = {}) => of.map(([field, title, step = 1]) =>
  numberField(field, title, limits[field], { step, ...(required ? { placeholder: "", required: true } : {}) }));

const labelOf = (element) => element.getAttribute("aria-label") || element.textContent;

// A view that is read again after each change and, with `everyMs`, now and then: the focus stays where it was.
export async function shown(view, read, draw, everyMs = 0) {
  const again = async (wanted = () => true) => {
    const found = await read();
    if (!wanted() || !view.isConnected) return;
    const held = view.contains(document.activeElement) && labelOf(document.activeElement);
    view.replaceChildren(...draw(found, again));
    if (held) [...view.querySelectorAll("button")].find((each) => labelOf(each) === held)?.focus();
    document.body.dataset.drawn = "records";
  };
  await again();
  if (!everyMs) return () => {};
  const quiet = () => !document.hidden && !document.querySelector("dialog[open]");
  const timer = setInterval(() => {
    if (quiet()) again(quiet).then(() => { find("notice").textContent = ""; }, (error) => { find("notice").textContent = error.message; });
  }, everyMs);
  return () => clearInterval(timer);
}
