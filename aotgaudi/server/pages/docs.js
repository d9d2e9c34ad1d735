// Shows openapi.json: each path with the fields of its body, and below them the values that these name. All of it is text.
"use strict";

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const nameOf = (reference) => reference.split("/").pop();

// Returns the parts of a type, some of which are links to the schemas that they name.
function typeOf(schema) {
  if (schema.$ref) return [make("a", { href: `#${nameOf(schema.$ref)}` }, nameOf(schema.$ref).replace(/^_/, ""))];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  const choices = (schema.anyOf || schema.oneOf || []).filter((choice) => choice.type !== "null");
  if (choices.length) {
    return choices.flatMap((choice, index) => (index ? [" or ", ...typeOf(choice)] : typeOf(choice)));
  }
  if (schema.type === "array") return ["list of (", ...typeOf(schema.items || {}), ")", within(schema, "Items", "items")];
  if (schema.type === "string") return ["string", within(schema, "Length", "characters")];
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return ["object of (", ...typeOf(schema.additionalProperties), ")"];
  }
  const { minimum = -Infinity, maximum = Infinity } = schema;
  const ends = [minimum, maximum].filter((end) => Math.abs(end) < 2 ** 53);
  return [schema.type || "anything", ends.length === 2 ? ` ${minimum} to ${maximum}` : ends.length ? ` from ${ends[0]}` : ""];
}

function within(schema, what, unit) {
  const least = schema[`min${what}`], most = schema[`max${what}`];
  if (most === undefined) return least ? ` (at least ${least} ${unit})` : "";
  return least === undefined ? ` (at most ${most} ${unit})` : ` (${least} to ${most} ${unit})`;
}

function fields(schema) {
  const required = schema.required || [];
  const rows = Object.entries(schema.properties || {}).flatMap(([name, value]) => {
    const standard = value.default === undefined || value.default === null ? "" : `; ${JSON.stringify(value.default)} by default`;
    const needed = required.includes(name) ? "; required" : "";
    return [make("dt", {}, make("code", {}, name)), make("dd", {}, ...typeOf(value), standard, needed, value.description ? `. ${value.description}` : "")];
  });
  return rows.length ? make("dl", {}, ...rows) : make("p", { class: "quiet" }, "no fields");
}

function operation(method, path, described, schemas) {
  const title = make("h2", {}, make("code", {}, `${method.toUpperCase()} ${path}`));
  const section = make("section", {}, title, make("p", {}, described.summary || ""));
  if (described.requestBody) {
    const body = schemas[nameOf(described.requestBody.content["application/json"].schema.$ref)];
    section.append(make("details", {}, make("summary", {}, `${Object.keys(body.properties).length} fields`), fields(body)));
  }
  return section;
}

async function show() {
  const answer = await fetch("openapi.json", { cache: "no-store" });
  if (!answer.ok) throw new Error(`openapi.json: status ${answer.status}`);
  const api = await answer.json(), schemas = api.components.schemas, paths = Object.entries(api.paths);
  const bodies = new Set();
  for (const [path, methods] of paths) {
    for (const [method, described] of Object.entries(methods)) {
      if (described.requestBody) bodies.add(nameOf(described.requestBody.content["application/json"].schema.$ref));
      $("api").append(operation(method, path, described, schemas));
    }
  }
  for (const [name, schema] of Object.entries(schemas)) {
    if (bodies.has(name)) continue;
    $("api").append(make("section", { id: name }, make("h2", {}, name.replace(/^_/, "")), fields(schema)));
  }
  $("version").textContent = api.info.version;
  $("state").textContent = `${paths.length} paths.`;
}

show().catch((error) => { $("state").textContent = `It cannot be read: ${error.message}.`; });
