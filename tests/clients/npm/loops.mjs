// An agent's loop with each package: node loops.mjs URL QUESTION. Prints one line of JSON, package -> answer.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, stepCountIs, streamObject, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const [url, question] = process.argv.slice(2);
const schema = { type: "object", properties: { city: { type: "string" } } };
const weather = ({ city }) => `sunny in ${city}`;
const key = { apiKey: "any", maxRetries: 0 };
const answers = {};
globalThis.AI_SDK_LOG_WARNINGS = false; // of schemas that a provider does not send

{
  const client = new Anthropic({ baseURL: url, ...key });
  const messages = [{ role: "user", content: question }];
  const tools = [{ name: "weather", input_schema: schema }];
  const ask = () => client.messages.stream({ model: "m", max_tokens: 100, messages, tools }).finalMessage();
  const { content } = await ask();
  const result = { type: "tool_result", tool_use_id: content[0].id, content: weather(content[0].input) };
  messages.push({ role: "assistant", content }, { role: "user", content: [result] });
  answers["@anthropic-ai/sdk"] = (await ask()).content[0].text;
  for (const stream of [false, true]) {
    const run = async ({ city }) => weather({ city });
    const runner = client.beta.messages.toolRunner({
      ...{ model: "m", max_tokens: 100, stream, messages: [{ role: "user", content: question }] },
      tools: [{ type: "custom", name: "weather", input_schema: schema, run, parse: (input) => input }],
    });
    answers[`@anthropic-ai/sdk: toolRunner${stream ? ", streamed" : ""}`] = (await runner).content[0].text;
  }
}
{
  const client = new Ollama({ host: url });
  const messages = [{ role: "user", content: question }];
  const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
  const ask = async () => {
    const all = { role: "assistant", content: "", tool_calls: [] };
    for await (const { message } of await client.chat({ model: "m", messages, tools, stream: true })) {
      all.content += message.content;
      all.tool_calls.push(...(message.tool_calls ?? []));
    }
    return all;
  };
  const first = await ask();
  const content = weather(first.tool_calls[0].function.arguments);
  messages.push(first, { role: "tool", tool_name: "weather", content });
  answers.ollama = (await ask()).content;
}
{
  const client = new OpenAI({ baseURL: `${url}/v1`, ...key });
  const tools = [{ type: "function", name: "weather", parameters: schema, strict: false }];
  const ask = (body) => client.responses.stream({ model: "m", tools, ...body }).finalResponse();
  const first = await ask({ input: question });
  const { call_id, arguments: given } = first.output[0];
  const input = [{ type: "function_call_output", call_id, output: weather(JSON.parse(given)) }];
  answers.openai = (await ask({ input, previous_response_id: first.id })).output_text;
}
{
  const how = { baseURL: `${url}/v1`, apiKey: "any" };
  const city = z.object({ city: z.string() });
  const tools = { weather: tool({ inputSchema: city, execute: weather }) };
  const models = {
    "@ai-sdk/openai": createOpenAI(how)("m"),
    "@ai-sdk/openai-compatible": createOpenAICompatible({ name: "any", ...how })("m"),
  };
  for (const [name, model] of Object.entries(models)) {
    const run = streamText({ model, prompt: question, tools, stopWhen: stepCountIs(3), maxRetries: 0 });
    answers[name] = await run.text;
    const asked = { model, schema: city, prompt: "Which object?", maxRetries: 0 };
    answers[`${name}: generateObject`] = (await generateObject(asked)).object.city;
    const live = streamObject(asked);
    for await (const _ of live.partialObjectStream);
    answers[`${name}: streamObject`] = (await live.object).city;
  }
}
console.log(JSON.stringify(answers));
