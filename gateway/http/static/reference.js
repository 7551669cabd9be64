// The OpenAPI or AsyncAPI document, readable.

import { make } from "./frame.js";

const source = location.pathname.startsWith("/asyncapi") ? "/asyncapi.json" : "/openapi.json";
const content = document.getElementById("content"), index = document.getElementById("index");
let doc;

// Text with `code` in it.
function prose(text) {
  return (text || "").replaceAll("``", "`").split(/`([^`]*)`/).map((part, at) => at % 2 ? make("code", {}, part) : part);
}

function resolve(reference) {
  return reference.slice(2).split("/").reduce((found, step) => found[step], doc);
}

function entry(id, title, ...children) {
  return make("section", {id}, make("h3", {}, title), ...children);
}

function heading(title, entries) {
  if (!entries.length) return;
  index.append(make("h2", {}, title), ...entries.map(([id, label]) => make("a", {href: "#" + id}, label)));
  content.append(make("h2", {}, title), ...entries.map(([, , element]) => element));
}

// Schemas --------------------------------------------------------------------------------------------------

function typeOf(schema) {
  if (!schema || !Object.keys(schema).length) return ["anything"];
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [make("a", {href: "#schema-" + name}, name)];
  }
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.flatMap((choice, at) => at ? [" or ", ...typeOf(choice)] : typeOf(choice));
  if (schema.const !== undefined) return [make("code", {}, JSON.stringify(schema.const))];
  if (schema.enum) return schema.enum.flatMap((value, at) => [at ? " " : "", make("code", {}, JSON.stringify(value))]);
  if (schema.type === "array") {
    if (schema.prefixItems) return ["[", ...schema.prefixItems.flatMap((item, at) => [at ? ", " : "", ...typeOf(item)]), "]"];
    return ["list of ", ...typeOf(schema.items)];
  }
  if (schema.type === "object" && typeof schema.additionalProperties === "object")
    return ["object of ", ...typeOf(schema.additionalProperties)];
  return [[].concat(schema.type).join(" or ")];
}

const BOUNDS = {minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below",
  minLength: "length at least", maxLength: "length at most", minItems: "items at least", maxItems: "items at most",
  minProperties: "fields at least", maxProperties: "fields at most", pattern: "matches"};

function bounds(schema) {
  const own = Object.keys(BOUNDS).filter(key => schema[key] !== undefined).map(key => `${BOUNDS[key]} ${schema[key]}`);
  return [...own, ...(schema.anyOf || []).flatMap(bounds)];
}

function remarks(schema) {
  const list = bounds(schema);
  const simple = schema.default !== undefined && (schema.default === null || typeof schema.default !== "object");
  if (simple && schema.default !== null && schema.default !== "") list.push(`default ${JSON.stringify(schema.default)}`);
  return list.join(", ");
}

function row(name, required, schema, description) {
  return make("tr", {},
    make("td", {}, make("code", {}, name), required ? make("span", {class: "soft"}, " required") : ""),
    make("td", {}, typeOf(schema), make("p", {class: "soft"}, remarks(schema)), make("p", {}, prose(description))));
}

function fields(schema) {
  if (schema.type !== "object" || !schema.properties) return make("p", {}, typeOf(schema));
  const required = schema.required || [];
  return make("table", {}, Object.entries(schema.properties).map(
    ([name, field]) => row(name, required.includes(name), field, field.description)));
}

function schemas() {
  heading("Schemas", Object.entries(doc.components.schemas).map(([name, schema]) => {
    const id = "schema-" + name;
    const note = schema.additionalProperties === false ? make("p", {class: "soft"}, "Other fields are refused.") : "";
    return [id, name, entry(id, name, make("p", {}, prose(schema.description)), fields(schema), note)];
  }));
}

// OpenAPI --------------------------------------------------------------------------------------------------

function body(described) {
  return Object.entries(described.content || {}).map(([kind, {schema}]) =>
    make("div", {}, make("span", {class: "soft"}, kind, ": "), schema.properties ? fields(schema) : typeOf(schema)));
}

function operation(path, verb, described) {
  const id = described.operationId;
  const parts = [make("p", {}, prose(described.summary))];
  if (described.parameters) parts.push(make("h4", {}, "Parameters"), make("table", {}, described.parameters.map(
    parameter => row(`${parameter.name} (${parameter.in})`, parameter.required, parameter.schema, parameter.description))));
  if (described.requestBody) parts.push(make("h4", {}, "Body"), ...body(described.requestBody));
  parts.push(make("h4", {}, "Answers"), make("table", {}, Object.entries(described.responses).map(([status, answer]) =>
    make("tr", {}, make("td", {}, make("code", {}, status)),
      make("td", {}, make("p", {}, prose(answer.description)), status < 400 ? body(answer) : "")))));
  const title = [make("span", {class: "verb"}, verb), path];
  return [id, `${verb.toUpperCase()} ${path}`, entry(id, title, ...parts)];
}

function openapi() {
  const tags = new Map();
  for (const [path, verbs] of Object.entries(doc.paths))
    for (const [verb, described] of Object.entries(verbs)) {
      const tag = described.tags[0];
      tags.set(tag, [...(tags.get(tag) || []), operation(path, verb, described)]);
    }
  for (const [tag, entries] of tags) heading(tag, entries);
}

// AsyncAPI -------------------------------------------------------------------------------------------------

function links(references) {
  return references.flatMap((reference, at) =>
    [at ? ", " : "", ...typeOf(resolve(resolve(reference.$ref).$ref).payload)]);
}

function channel(name, described) {
  const id = "channel-" + name;
  const operations = Object.values(doc.operations).filter(one => one.channel.$ref === "#/channels/" + name);
  const parties = action => operations.filter(one => one.action === action).map(one => one.tags[0].name).join(", ");
  const messages = Object.keys(described.messages).map(key => ({$ref: `#/channels/${name}/messages/${key}`}));
  const reply = (operations.find(one => one.reply) || {}).reply;
  const line = (label, ...value) => make("tr", {}, make("td", {class: "soft"}, label), make("td", {}, ...value));
  return [id, name, entry(id, name,
    make("p", {}, make("code", {}, described.address)),
    make("p", {}, prose([described.summary, described.description].filter(Boolean).join(" "))),
    make("table", {},
      line("sent by", parties("send")), line("received by", parties("receive")),
      line("carries", messages.length ? links(messages) : "an empty message"),
      reply ? line("answered with", links(reply.messages)) : ""))];
}

function asyncapi() {
  heading("Channels", Object.entries(doc.channels).filter(([, one]) => one.address !== null).map(
    ([name, described]) => channel(name, described)));
}

async function show() {
  const answer = await fetch(source);
  if (!answer.ok) throw new Error(`${source}: ${answer.status}`);
  doc = await answer.json();
  document.title = doc.info.title;
  index.append(make("a", {href: source}, "this as JSON"));
  content.replaceChildren(make("h1", {}, doc.info.title), make("p", {}, prose(doc.info.description)));
  if (doc.openapi) openapi(); else asyncapi();
  schemas();
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}
show().catch(error => content.replaceChildren(make("p", {}, `The document cannot be shown: ${error.message}`)));
