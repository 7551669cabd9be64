// One request's time as a bar by phase, and the sentence that says why.

import { DASH, badge, make, short, span } from "./frame.js";

const NAMES = ["edge", "admission", "queue", "dispatch", "prefill", "decode", "retry", "relay", "caller"];
const COLOURS = { edge: 7, admission: 6, queue: 1, dispatch: 3, prefill: 2, decode: 0, retry: 4, relay: 5, caller: 8 };
const OUTCOMES = { completed: "good", cancelled: "warn", expired: "warn", failed: "bad", lost: "bad" };

export const outcome = (name, code = "") => badge(code && code !== name ? `${name}: ${code}` : name, OUTCOMES[name] || "");

export function phaseBar(times) {
  const known = times.phases.filter((phase) => phase.ms !== null && phase.ms > 0);
  const whole = Math.max(times.total_ms, known.reduce((sum, phase) => sum + phase.ms, 0)) || 1;
  const track = make("div", { class: "track", role: "img", "aria-label": known.map((phase) => `${phase.name} ${span(phase.ms)}`).join(", ") || "no phase is known" },
    known.map((phase) => {
      const part = make("i", { class: `f${COLOURS[phase.name] ?? 7}`, title: `${phase.name}: ${span(phase.ms)}` });
      part.style.width = `${(100 * phase.ms / whole).toFixed(3)}%`;
      return part;
    }));
  const shown = [...times.phases].sort((a, b) => NAMES.indexOf(a.name) - NAMES.indexOf(b.name));
  const legend = make("ul", { class: "legend" }, shown.filter((phase) => phase.ms === null || phase.ms >= 0.5).map((phase) =>
    make("li", {}, make("i", { class: `f${COLOURS[phase.name] ?? 7}` }), `${phase.name} ${phase.ms === null ? DASH : span(phase.ms)}`)));
  return make("div", { class: "phases" }, track, legend);
}

// One request: who, what came of it, how long, the bar, the sentence.
export function requestItem(times, { tenant = false, actions = [] } = {}) {
  const cached = times.cached_tokens ? ` (${short(times.cached_tokens)} cached)` : "";
  return make("li", {},
    make("div", { class: "line" },
      make("strong", {}, span(times.total_ms)), outcome(times.outcome, times.code),
      make("span", { dir: "auto" }, times.model + (times.version ? `@${times.version}` : "")), tenant ? make("span", { dir: "auto", class: "soft" }, times.tenant) : "",
      make("span", { class: "soft" }, `first token ${span(times.first_token_ms)}`),
      make("span", { class: "soft" }, `${short(times.prompt_tokens)}${cached} + ${short(times.completion_tokens)} tokens`),
      times.attempts > 1 ? badge(`${times.attempts} attempts`, "warn") : "",
      make("span", { class: "mono soft" }, times.request_id), actions),
    phaseBar(times), times.why ? make("p", { dir: "auto" }, times.why) : "");
}
