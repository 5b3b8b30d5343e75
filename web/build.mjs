// Bundles the pages into genserve/server/pages/bundle, which is committed. `node build.mjs --check` only compares.

import { copyFile, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { build } from "esbuild";

const COMMITTED = new URL("../genserve/server/pages/bundle/", import.meta.url).pathname;
const isCheck = process.argv.includes("--check");
const folder = isCheck ? await mkdtemp(join(tmpdir(), "page-")) : COMMITTED;

const { metafile } = await build({
  entryPoints: {
    chat: "src/main.tsx",
    style: "src/style.css",
    dashboard: "src/dashboard/main.ts",
    dashboard_style: "src/dashboard/style.css",
    math: "src/math.ts",
  },
  external: ["./math.js"], // loaded when it is needed
  loader: { ".woff2": "file", ".woff": "empty", ".ttf": "empty" }, // all browsers read woff2
  assetNames: "[name]",
  outdir: folder,
  bundle: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  minify: true,
  legalComments: "none", // the licences are in licenses.txt
  charset: "utf8",
  metafile: true,
});
for (const path of ["src/index.html", "src/icon.svg", "src/dashboard/dashboard.html"]) {
  await copyFile(path, join(folder, basename(path)));
}
await writeFile(join(folder, "licenses.txt"), await licenses(Object.keys(metafile.inputs)));
if (isCheck) await compare();

/** The licences of all packages with a file in the bundle. */
async function licenses(inputs) {
  const packages = new Set(inputs.map((path) => /^node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1]));
  const texts = [];
  for (const name of [...packages].filter(Boolean).sort()) {
    const root = `node_modules/${name}`;
    const file = (await readdir(root)).find((entry) => /^licen[sc]e/i.test(entry));
    if (!file) throw new Error(`${name} has no file with its licence`);
    const { version } = JSON.parse(await readFile(`${root}/package.json`, "utf8"));
    texts.push(`${name} ${version}\n\n${(await readFile(`${root}/${file}`, "utf8")).trim()}\n`);
  }
  texts.push(await readFile("katex_fonts_license.txt", "utf8"));
  return texts.join(`\n${"-".repeat(80)}\n\n`);
}

async function compare() {
  const differing = [];
  const [built, committed] = [await readdir(folder), await readdir(COMMITTED)];
  for (const name of new Set([...built, ...committed])) {
    const [fresh, old] = await Promise.all([folder, COMMITTED].map((place) => read(join(place, name))));
    if (!fresh || !old || !fresh.equals(old)) differing.push(name);
  }
  await rm(folder, { recursive: true });
  if (differing.length) {
    console.error(
      `genserve/server/pages/bundle differs from a fresh build in ${differing.join(", ")}: run make page`,
    );
    process.exit(1);
  }
}

function read(path) {
  return readFile(path).catch(() => null);
}
