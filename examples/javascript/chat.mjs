// JavaScript without packages: a streamed chat by fetch, in Node or a browser.

const url = process.env.GENSERVE_URL ?? "http://127.0.0.1:8000";

const response = await fetch(`${url}/v1/chat/completions`, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify({
    messages: [{ role: "user", content: "What is the capital of Japan?" }],
    max_tokens: 32,
    temperature: 0,
    stream: true,
  }),
});
if (!response.ok) throw new Error((await response.json()).error.message);

let rest = "";
for await (const bytes of response.body.pipeThrough(new TextDecoderStream())) {
  const events = (rest + bytes).split("\n\n");
  rest = events.pop();
  for (const event of events) {
    const data = event.replace(/^data: /, "");
    if (data === "[DONE]" || event.startsWith(":")) continue;
    process.stdout.write(JSON.parse(data).choices[0]?.delta.content ?? "");
  }
}
console.log();
