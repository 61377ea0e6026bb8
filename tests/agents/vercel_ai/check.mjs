// Vercel AI SDK's agent over Responses and Chat Completions, plain and streamed, with a conversation that goes on.
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { apiKey, assert, baseURL, check, finish } from "./checks.mjs";

const openai = createOpenAI({ baseURL, apiKey });
const models = { responses: openai("scripted"), chat: openai.chat("scripted") };
const broken = "return a - b";
const mended = "return a + b";
const test = "from calc import add\n\nassert add(2, -2) == 0\nprint('2 tests passed')\n";

const tools = {
  read_file: tool({
    description: "Read a file.",
    inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => readFileSync(path, "utf8"),
  }),
  edit_file: tool({
    description: "Replace a text in a file.",
    inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
    execute: async ({ path, old, new: text }) => writeFileSync(path, readFileSync(path, "utf8").replace(old, text)),
  }),
  run_tests: tool({
    description: "Run the tests.",
    inputSchema: z.object({}),
    execute: async () => execFileSync("python3", ["test_calc.py"], { encoding: "utf8" }),
  }),
};
const call = (name, input = {}) => [{ name, arguments: input }];
const task = [
  call("read_file", { path: "calc.py" }),
  { seen: broken, calls: call("edit_file", { path: "calc.py", old: broken, new: mended }) },
  call("run_tests"),
  { seen: "2 tests passed", text: "It is mended." },
];
const again = [call("read_file", { path: "calc.py" }), { seen: mended, text: "It was mended." }];
const asked = (steps) => ({ role: "user", content: `Mend calc.py. <plan>${JSON.stringify(steps)}</plan>` });

for (const [name, model] of Object.entries(models)) {
  await check(`${name}: a task, and the same conversation again, streamed`, async () => {
    const folder = `${process.env.HOME}/${name}`;
    mkdirSync(folder);
    process.chdir(folder);
    writeFileSync("calc.py", `def add(a, b):\n    ${broken}\n`);
    writeFileSync("test_calc.py", test);
    const common = { model, tools, stopWhen: stepCountIs(6), maxRetries: 0 };
    const first = await generateText({ ...common, messages: [asked(task)] });
    assert.equal(first.text, "It is mended.");
    assert.ok(readFileSync("calc.py", "utf8").includes(mended));
    const messages = [asked(task), ...first.response.messages, asked(again)];
    const second = streamText({ ...common, messages });
    assert.equal(await second.text, "It was mended.");
  });
}

finish();
