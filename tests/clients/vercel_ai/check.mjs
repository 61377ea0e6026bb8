// Vercel AI SDK: its OpenAI provider (responses and chat) and the one for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { apiKey, assert, baseURL, check, finish, model, weatherQuestion } from "./checks.mjs";

const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({
  name: "inferd",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  "openai, responses": openai(model),
  "openai, chat": openai.chat(model),
  "openai-compatible": compatible(model),
};
const prompt = "Hello, who are you?";
const common = { temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const weatherTool = tool({
  description: "Get the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ city, temperature: 21 }),
});

for (const [name, chosen] of Object.entries(models)) {
  await check(`${name}: text, plain and streamed alike`, async () => {
    const plain = await generateText({ model: chosen, prompt, ...common });
    const stream = streamText({ model: chosen, prompt, ...common });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, plain.text);
    assert.ok(text.length > 0);
    assert.ok((await stream.usage).outputTokens > 0);
  });

  await check(`${name}: an object of a schema`, async () => {
    const schema = z.object({ name: z.string(), age: z.number() });
    const { object } = await generateObject({ model: chosen, prompt: "Invent a person.", schema, ...common });
    schema.parse(object);
  });

  await check(`${name}: a tool is run, and its result told`, async () => {
    const stream = streamText({
      model: chosen,
      prompt: weatherQuestion,
      tools: { get_weather: weatherTool },
      stopWhen: stepCountIs(3),
      ...common,
    });
    const calls = [];
    for await (const part of stream.fullStream) {
      if (part.type === "tool-call") calls.push(part.input);
      if (part.type === "error") throw part.error;
    }
    assert.deepEqual(calls, [{ city: "Paris" }]);
    assert.match(await stream.text, /21/);
  });
}

finish();
