// openai-node: chat, streams and their helpers, parsed answers, tools, responses, embeddings, errors.
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { apiKey, assert, baseURL, check, finish, model, weather, weatherQuestion } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello, who are you?" }];
const ask = [{ role: "user", content: weatherQuestion }];

await check("a chat answers plain and streamed alike", async () => {
  const options = { model, messages, temperature: 0, max_tokens: 40 };
  const plain = await client.chat.completions.create(options);
  let text = "";
  let usage = null;
  const stream = await client.chat.completions.create({
    ...options,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, plain.choices[0].message.content);
  assert.deepEqual(usage, plain.usage);
});

await check("the stream helper builds the same message", async () => {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 40 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
});

await check("parse gives an object of the schema", async () => {
  const person = z.object({ name: z.string(), age: z.number() });
  const answer = await client.chat.completions.parse({
    model,
    messages,
    seed: 1,
    response_format: zodResponseFormat(person, "person"),
  });
  person.parse(answer.choices[0].message.parsed);
});

await check("a tool is run by the helper", async () => {
  const cities = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: ask,
    temperature: 0,
    tools: [
      {
        type: "function",
        function: {
          ...weather.function,
          parse: JSON.parse,
          function: ({ city }) => {
            cities.push(city);
            return JSON.stringify({ temperature: 21 });
          },
        },
      },
    ],
  });
  assert.match(await runner.finalContent(), /21/);
  assert.deepEqual(cities, ["Paris"]);
});

await check("a streamed call is a whole one", async () => {
  const stream = client.chat.completions.stream({
    model,
    messages: ask,
    tools: [weather],
    tool_choice: "required",
    temperature: 0,
  });
  const final = await stream.finalChatCompletion();
  const [call] = final.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

await check("responses answer and stream", async () => {
  const first = await client.responses.create({ model, input: "Hello", temperature: 0, max_output_tokens: 30 });
  const kinds = [];
  let text = "";
  const stream = await client.responses.create({
    model,
    input: "Hello",
    temperature: 0,
    max_output_tokens: 30,
    stream: true,
  });
  for await (const event of stream) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, first.output_text);
  assert.equal(kinds.at(-1), "response.completed");
});

await check("embeddings come back as numbers", async () => {
  const answer = await client.embeddings.create({ model, input: "a cat" });
  assert.ok(answer.data[0].embedding.every(Number.isFinite));
});

await check("errors have their classes and codes", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), (error) => {
    return error instanceof NotFoundError && error.code === "model_not_found";
  });
  await assert.rejects(client.chat.completions.create({ model, messages, max_tokens: -2 }), (error) => {
    return error instanceof BadRequestError && error.code === "integer_below_min_value" && error.param === "max_tokens";
  });
  await assert.rejects(new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(), (error) => {
    return error instanceof AuthenticationError && error.code === "invalid_api_key";
  });
});

await check("a stream can be left", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 500, stream: true });
  for await (const _ of stream) break;
  assert.equal((await client.models.retrieve(model)).id, model);
});

finish();
