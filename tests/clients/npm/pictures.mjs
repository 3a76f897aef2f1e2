// A picture with each package, whole and streamed, and what is refused: node pictures.mjs URL QUESTION PICTURE.
// PICTURE: a PNG in base64. Prints one line of JSON, package -> [tokens of the prompt, refusal].
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, streamText } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, text, picture] = process.argv.slice(2);
const key = { apiKey: "any", maxRetries: 0 };
const broken = Buffer.from("no picture").toString("base64");
const answers = {};

/** ask(data): asks about a picture in base64, and gives the tokens of the prompt. */
const add = async (name, ask) => {
  const tokens = await ask(picture);
  answers[name] = [tokens, await ask(broken).then(() => "", (error) => `${error.constructor.name}: ${error.message}`)];
};

{
  const { messages } = new Anthropic({ baseURL: url, ...key });
  await add("@anthropic-ai/sdk", async (data) => {
    const source = { type: "base64", media_type: "image/png", data };
    const content = [{ type: "image", source }, { type: "text", text }];
    const asked = { model: "m", max_tokens: 4, messages: [{ role: "user", content }] };
    const { usage } = await messages.stream(asked).finalMessage();
    return usage.input_tokens + (usage.cache_read_input_tokens ?? 0);
  });
}
{
  const client = new Ollama({ host: url });
  await add("ollama", async (data) => {
    const messages = [{ role: "user", content: text, images: [data] }];
    let last;
    for await (last of await client.chat({ model: "m", messages, stream: true }));
    return last.prompt_eval_count;
  });
}
{
  const client = new OpenAI({ baseURL: `${url}/v1`, ...key });
  await add("openai: chat", async (data) => {
    const image_url = { url: `data:image/png;base64,${data}`, detail: "high" };
    const content = [{ type: "image_url", image_url }, { type: "text", text }];
    const asked = { model: "m", messages: [{ role: "user", content }], max_tokens: 4 };
    return (await client.chat.completions.create(asked)).usage.prompt_tokens;
  });
  await add("openai: responses", async (data) => {
    const shown = { type: "input_image", image_url: `data:image/png;base64,${data}`, detail: "auto" };
    const input = [{ role: "user", content: [shown, { type: "input_text", text }] }];
    const run = client.responses.stream({ model: "m", input, max_output_tokens: 16 });
    return (await run.finalResponse()).usage.input_tokens;
  });
}
{
  const how = { baseURL: `${url}/v1`, apiKey: "any" };
  const models = {
    "@ai-sdk/openai": createOpenAI(how)("m"),
    "@ai-sdk/openai-compatible": createOpenAICompatible({ name: "any", includeUsage: true, ...how })("m"),
  };
  for (const [name, model] of Object.entries(models)) {
    const asked = (data) => {
      const content = [{ type: "image", image: Buffer.from(data, "base64"), mediaType: "image/png" }, { type: "text", text }];
      return { model, messages: [{ role: "user", content }], maxOutputTokens: 16, maxRetries: 0 };
    };
    await add(name, async (data) => (await generateText(asked(data))).usage.inputTokens);
    const run = streamText(asked(picture));
    await run.text;
    answers[`${name}: streamed`] = [(await run.usage).inputTokens, ""];
  }
}
console.log(JSON.stringify(answers));
