// The AI SDK by one of its providers: text, stream, forced tool, object. ai_sdk.mjs PROVIDER URL KEY MODEL
import { generateObject, generateText, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const [, , provider, url, apiKey, name] = process.argv;
const baseURL = `${url}/v1`;
const model = {
  "openai.responses": () => createOpenAI({ baseURL, apiKey }).responses(name),
  "openai.chat": () => createOpenAI({ baseURL, apiKey }).chat(name),
  anthropic: () => createAnthropic({ baseURL, apiKey })(name),
  compatible: () => createOpenAICompatible({ name: "headrace", baseURL, apiKey, supportsStructuredOutputs: true })(name),
}[provider]();
const ask = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0, prompt: "What is the capital of France?" };

const whole = await generateText(ask);
if (!whole.text) throw new Error("no text");

let streamed = "";
for await (const piece of streamText(ask).textStream) streamed += piece;
if (streamed !== whole.text) throw new Error(`streamed ${streamed}`);

const keep = tool({ description: "Keep a city.", inputSchema: z.object({ city: z.string().max(20) }) });
const called = await generateText({ ...ask, maxOutputTokens: 100, tools: { keep }, toolChoice: "required" });
if (typeof called.toolCalls[0].input.city !== "string") throw new Error("no call");

const schema = z.object({ city: z.string().max(20), capital: z.boolean() });
const made = await generateObject({ ...ask, maxOutputTokens: 100, schema });
if (typeof made.object.capital !== "boolean") throw new Error("no object");

console.log("answered", whole.text);
