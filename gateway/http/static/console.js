// The operator's console: which views a key may see, and which one is shown.

import { call, find, key, make, onKey } from "./frame.js";
import * as live from "./live.js";
import * as models from "./models.js";
import * as records from "./records.js";
import * as trail from "./trail.js";

// By the address's fragment: title, the scope that it needs, and what shows it; `open` gives what ends it.
const VIEWS = {
  live: { title: "Live", scope: "admin:models", open: live.open },
  requests: { title: "Requests", scope: "admin:usage", open: trail.requests },
  tenants: { title: "Tenants", scope: "admin:tenants", open: records.tenants },
  keys: { title: "Keys", scope: "admin:keys", open: records.keys },
  models: { title: "Models", scope: "admin:models", open: models.open },
  prices: { title: "Prices", scope: "admin:prices", open: records.prices },
  quarantine: { title: "Quarantine", scope: "admin:models", open: trail.quarantine },
  audit: { title: "Audit", scope: ["admin:keys", "admin:tenants", "admin:models", "admin:usage", "admin:prices"], open: trail.audit },
};

const view = find("view"), notice = find("notice"), state = find("state");
let scopes = [], close = () => {}, opened = "", number = 0;

export function tell(text, kind = "") {
  state.className = `state ${kind}`;
  if (state.textContent !== text) state.textContent = text;
}

const wanted = () => location.hash.slice(1);
const allowed = () => Object.keys(VIEWS).filter((name) => !VIEWS[name].scope || [].concat(VIEWS[name].scope).some((scope) => scopes.includes(scope)));

async function login() {
  const mine = ++number;
  notice.textContent = "";
  shut();
  scopes = [];
  find("views").replaceChildren();
  find("empty").hidden = Boolean(key());
  if (!key()) return;
  try {
    const own = await call("/admin/v1/key");
    if (mine !== number) return;
    scopes = own.scopes;
    if (!allowed().length) throw new Error("This key is for nothing here: the console needs a key for areas of the administration.");
    show();
  } catch (error) {
    if (mine === number) fail(error);
  }
}

function fail(error) {
  notice.textContent = error.message;
  tell("not connected", "bad");
  document.body.dataset.drawn = "failed";
}

function shut() {
  close();
  close = () => {};
  opened = "";
  view.replaceChildren();
  delete document.body.dataset.drawn;
  tell("");
}

async function show() {
  const names = allowed();
  if (!names.length) return;
  const name = names.includes(wanted()) ? wanted() : names[0];
  find("views").replaceChildren(...names.map((each) => make("a", { href: `#${each}`, "aria-current": each === name ? "page" : false }, VIEWS[each].title)));
  if (name === opened) return;
  shut();
  opened = name;
  notice.textContent = "";
  find("title").textContent = VIEWS[name].title;
  document.title = `Headrace ${VIEWS[name].title.toLowerCase()}`;
  // A place of its own: what a view that was left reads late is drawn nowhere.
  const place = view.appendChild(make("div", { class: "view" }));
  try {
    const end = await VIEWS[name].open(place, { tell, fail, scopes, notice }) || (() => {});
    if (place.isConnected) close = end;
    else end();
  } catch (error) {
    if (place.isConnected) fail(error);
  }
}

onKey(login);
addEventListener("hashchange", show);
login();
