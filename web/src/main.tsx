// Starts the page.

import { effect } from "@preact/signals";
import { render } from "preact";
import { theme } from "./preferences";
import { connect, flush, models, restore } from "./state";
import { App } from "./view/app";

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden)
    flush(); // the page may be closed
  else if (!models.value.length) connect(); // the server may have been started, or have loaded its models
});
addEventListener("pagehide", flush);

const PATIENCE_MS = 500; // before the page is shown without the server's answer

const root = document.getElementById("page") as HTMLElement;
root.replaceChildren();
await restore().catch(() => undefined);
await Promise.race([connect(), new Promise((shown) => setTimeout(shown, PATIENCE_MS))]);
render(<App />, root);
