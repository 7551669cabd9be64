// A page to chat on.

import { call, find, key, make, onKey, readEvents, request } from "./frame.js";

const [modelField, talk, messageField, sendButton, stopButton, notice] = ["model", "talk", "message", "send", "stop", "notice"].map(find);
let history = [];
let running = null;

async function loadModels() {
  notice.textContent = "";
  modelField.disabled = true;
  modelField.replaceChildren(new Option("–", ""));
  if (!key()) return;
  try {
    const models = (await call("/v1/models")).data.filter((model) => model.endpoints.includes("chat/completions"));
    if (!models.length) { notice.textContent = "This key may chat with no model."; return; }
    modelField.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    const last = sessionStorage.getItem("model");
    if (models.some((model) => model.id === last)) modelField.value = last;
    modelField.disabled = false;
    find("empty").textContent = "Write something.";
  } catch (error) {
    notice.textContent = error.message;
  }
}

function bubble(role, text) {
  const said = make("div", { class: "text", dir: "auto" }, text);
  const item = make("li", { class: role }, make("span", { class: "hidden" }, role === "user" ? "You wrote:" : "The model answered:"), said);
  find("empty").hidden = true;
  talk.append(item);
  toEnd();
  return [item, said];
}

function toEnd() { find("main").scrollTop = find("main").scrollHeight; }

function atEnd() {
  const main = find("main");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 80;
}

async function ask() {
  const question = messageField.value.trim();
  if (!question || running) return;
  notice.textContent = "";
  if (!modelField.value) { notice.textContent = "Enter a valid API key first."; find("key").focus(); return; }
  messageField.value = "";
  bubble("user", question);
  history.push({ role: "user", content: question });
  const [item, text] = bubble("assistant", "");
  item.classList.add("writing");
  running = new AbortController();
  sendButton.disabled = true;
  stopButton.disabled = false;
  const began = performance.now();
  let first = 0, last = 0, usage = null, finished = false, stopped = false, failure = "", content = "";
  try {
    const response = await request("/v1/chat/completions", {
      method: "POST", signal: running.signal,
      body: {
        model: modelField.value, messages: history, stream: true, stream_options: { include_usage: true },
        temperature: 0.2,  // small models ramble at 1
      },
    });
    await readEvents(response.body, (data) => {
      if (data === "[DONE]") { finished = true; return; }
      const event = JSON.parse(data);
      if (event.error) { failure = `${event.error.message} (request ${event.error.request_id})`; return; }
      if (event.usage) usage = event.usage;
      const delta = event.choices && event.choices[0] && event.choices[0].delta.content;
      if (!delta) return;
      last = performance.now();
      first ||= last;
      content += delta;
      const follow = atEnd();
      text.textContent = content;
      if (follow) toEnd();
    });
    if (!finished && !failure) failure = "The connection ended before the answer was complete.";
  } catch (error) {
    stopped = error.name === "AbortError";
    failure = stopped ? "Stopped." : error.message;
  }
  item.classList.remove("writing");
  if (content) history.push({ role: "assistant", content }); else history.pop();
  const figures = [];
  if (first) figures.push(`first token ${Math.round(first - began)} ms`);
  if (usage && last > first) figures.push(`${((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s`);
  if (usage) figures.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  const follow = atEnd();
  if (figures.length) item.append(make("div", { class: "figures" }, figures.join(" · ")));
  if (failure) item.append(make("div", { class: stopped ? "figures" : "error" }, failure));
  if (follow) toEnd();
  find("status").textContent = failure || `Answer complete: ${content}`;
  running = null;
  sendButton.disabled = false;
  stopButton.disabled = true;
  messageField.focus();
}

onKey(loadModels);
modelField.addEventListener("change", () => sessionStorage.setItem("model", modelField.value));
find("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
messageField.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
stopButton.addEventListener("click", () => running && running.abort());
find("clear").addEventListener("click", () => {
  if (running) running.abort();
  history = [];
  talk.replaceChildren();
  find("empty").hidden = false;
  messageField.focus();
});
await loadModels();
document.body.dataset.ready = "yes";
