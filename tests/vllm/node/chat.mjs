// What the official Node SDK gets: chat, streaming, tools, errors, retries. Prints one JSON object.
import OpenAI from "openai";

const [, , baseURL, apiKey, model] = process.argv;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const ask = {
  model, temperature: 0, max_tokens: 40, messages: [{ role: "user", content: "What is the capital of France?" }],
};

const whole = await client.chat.completions.create(ask);

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...ask, stream: true, stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const parameters = {
  type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false,
};
const called = await client.chat.completions.create({
  ...ask, tools: [{ type: "function", function: { name: "keep", parameters } }], tool_choice: "required", max_tokens: 200,
});

const response = await client.responses.create({ model, input: "What is the capital of France?", temperature: 0 });

async function failing(call) {
  try { await call(); } catch (error) { return [error.constructor.name, error.status, error.code]; }
  return [];
}
const denied = await failing(() => new OpenAI({ baseURL, apiKey: "hr_wrong" }).chat.completions.create(ask));
const unknown = await failing(() => client.chat.completions.create({ ...ask, model: "none" }));

console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, usage,
  arguments: JSON.parse(called.choices[0].message.tool_calls[0].function.arguments),
  response: response.output_text, denied, unknown,
}));
