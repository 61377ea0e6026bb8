// Shared by the checks of JavaScript clients: the server's address, and how a check reports.
import assert from "node:assert/strict";

export { assert };
export const url = process.env.INFERD_URL;
export const baseURL = `${url}/v1`;
export const apiKey = process.env.INFERD_KEY;
export const model = "tiny";

export const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
export const weatherQuestion = "What is the weather in Paris?";

let failed = 0;

export async function check(what, body) {
  try {
    await body();
    console.log(`ok ${what}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${what}`);
    console.log(error);
  }
}

export const finish = () => process.exit(failed ? 1 : 0);
